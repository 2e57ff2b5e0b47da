// Holds launches back until the policy lets them go. The thread that launches waits here and then calls the driver
// itself, so arguments, attributes, context, errors and the order within its streams stay as they are.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "driver_abi.h"
#include "kernel_info.h"
#include "orion_scheduler.h"
#include "policy.h"

namespace orion {

// A stream that a client has bound. Once made it lives as long as the process: a launch may hold it over a stop.
struct Stream {
  explicit Stream(cuda::Handle handle) : handle(handle) {}

  const cuda::Handle handle;
  std::atomic<int> client{-1};       // -1: not bound
  std::atomic<uint64_t> entered{0};  // launches let through
  std::atomic<uint64_t> left{0};     // of them, those that the driver has returned from

  // Under the gate's lock:
  uint64_t finished = 0;      // of left, seen to have ended
  uint64_t seen = 0;          // entered, when last looked at
  uint64_t launch_ns = 0;     // when a look last found new launches
  uint64_t progress_ns = 0;   // when a look last found new launches or ends
  uint64_t round = 0;         // of the last look, and what it found
  Activity activity = Activity::Idle;

  // Events between launches show that a long queue moves, which a query of the stream does not.
  static constexpr uint64_t kLaunchesPerMark = 4;
  static constexpr uint64_t kMarks = 256;  // a driver takes about 1024 launches ahead of the device
  std::atomic<uint64_t> last_marked{0};
  std::mutex marks_lock;  // of what follows; never held over a wait
  struct Mark {
    cuda::Handle event = nullptr;
    uint64_t left = 0;  // so many launches have ended when the event has
  } marks[kMarks];
  uint64_t first_mark = 0, next_mark = 0;
};

class Gate {
 public:
  // These report a status of orion_scheduler.h and, if it is an error, why.
  int start(int clients, const Limits& limits, const cuda::Driver& driver, std::string& error);
  int bind(int client, cuda::Handle handle, std::string& error);
  void stop();
  void unbind(cuda::Handle handle);

  bool running() const { return running_.load(std::memory_order_acquire); }
  int clients() const { return clients_; }
  std::vector<cuda::Handle> streams(int client);

  // Around a launch. enter() waits until the launch may go; null: it is not gated. leave() only if it was not null.
  Stream* enter(cuda::Handle handle, cuda::Handle function);
  void leave(Stream* stream);

  // Held while a capture begins: no stream may be queried that is being captured.
  std::mutex& lock() { return mutex_; }

  void set_mode(Mode mode);
  Mode mode();
  void set_threshold(int multiprocessors);
  int threshold();

  bool stats(int client, orion_stats& stats);
  void totals(orion_totals& totals);
  void reset_stats();

  KernelInfo& kernel_info() { return kernel_info_; }
  const cuda::Driver& driver() const { return driver_; }
  void use_clock(const Clock* clock) { clock_ = clock; }

  // Around fork(): the child's scheduler does not run.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  struct Request : Launch {
    Stream* stream = nullptr;
    uint32_t done = 0;  // the word that its thread waits on
    bool starved = false;
  };
  struct Client {
    std::atomic<uint64_t> submitted{0}, queued{0}, starved{0}, wait_ns{0}, max_wait_ns{0}, waiting{0};
    std::vector<Stream*> streams;  // under the lock
  };
  class Round;

  Stream* find(cuda::Handle handle) const;
  void unbind_locked(Stream& stream);
  void wait_for_grant(Request& request);
  void grant_what_may_go(uint64_t now_ns, const Request* own);  // own: of the calling thread
  void wake(Request& request);
  void mark(Stream& stream);
  void look_at_marks(Stream& stream, uint64_t now_ns);
  void drop_marks(Stream& stream);
  Client& client(int index) { return all_[index]; }

  // A table without locks, for readers: slots fill up and never empty, a stream that is not bound has client -1.
  static constexpr size_t kSlots = 4096;
  std::atomic<Stream*> slots_[kSlots] = {};
  size_t used_slots_ = 0;

  std::atomic<bool> running_{false};
  std::atomic<uint64_t> passed_{0}, captured_{0};
  std::atomic<uint64_t> hp_kernel_{0};  // packed: one store, so that class and size belong together
  std::atomic<int> clients_{0};
  cuda::Driver driver_{};
  const Clock* clock_ = &kSystemClock;
  KernelInfo kernel_info_;
  Client all_[ORION_MAX_CLIENTS];

  std::mutex mutex_;  // of what follows
  Limits limits_;
  int last_client_ = 0;
  uint64_t round_ = 0;
  uint64_t looked_ns_ = 0;  // when, last
  std::vector<Launch*> waiting_;  // Requests, on the stacks of their threads
};

}  // namespace orion
