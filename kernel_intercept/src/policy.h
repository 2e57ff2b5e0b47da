// Decides which waiting launch goes next. A pure function: time and the state of the device come from outside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace orion {

enum class Mode { Fifo = 0, MultiPriority = 1, RoundRobin = 2 };  // orion_mode

enum class KernelClass { Unknown = -1, MemoryBound = 0, ComputeBound = 1 };

struct Kernel {
  KernelClass kind = KernelClass::Unknown;
  int multiprocessors = 0;
};

enum class Activity {
  Idle,    // all that the client launched has ended
  Busy,    // it launches, or some of it has not ended
  Parked,  // some of it has not ended, but for max_wait_ns nothing was launched and nothing ended: it waits for something
};

struct Limits {
  Mode mode = Mode::RoundRobin;
  uint64_t max_wait_ns = 2'000'000;
  int max_outstanding = 2;
  int multiprocessor_threshold = 0;
};

// While client 0 is not at work, so many times max_outstanding are allowed: enough to keep the device fed, few enough
// that client 0 does not return to a long queue.
constexpr int kOutstandingWithoutHp = 16;

struct Launch {
  int client = 0;
  uint64_t since_ns = 0;  // when it came
  Kernel kernel;
};

struct History {
  int last_client = 0;         // whose best-effort launch went last
  bool hp_launched = false;    // client 0 has launched at all
  uint64_t hp_launch_ns = 0;   // when it last did
  Kernel hp_kernel;            // and what
};

// What the device says. Asked only where the answer matters: a query costs a call of the driver.
class Device {
 public:
  virtual Activity activity(int client) = 0;
  // Best-effort launches that have not ended, parked clients left out. May stop counting at `enough`.
  virtual int outstanding(int enough) = 0;

 protected:
  ~Device() = default;
};

struct Choice {
  ptrdiff_t index = -1;  // into waiting; -1: all of them go on waiting
  bool starved = false;  // goes whatever the device says, because it waited max_wait_ns
};

// All of `waiting` are best-effort launches: those of client 0 never wait.
Choice choose(const Limits& limits, const History& history, const std::vector<Launch*>& waiting, uint64_t now_ns,
              Device& device);

}  // namespace orion
