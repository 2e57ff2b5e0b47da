// A device without hardware: its memory, its streams and its events. It knows nothing of torch.
//
// A stream is a queue with a thread. Time is virtual: a kernel begins after a delay that the seed draws, and of all
// kernels that may run, that with the earliest time runs, alone. Nothing runs until the host waits for something, asks
// for something, or has been idle for a while (the patience): everything is as late as a correct program can stand, and
// with one host thread a run depends on its seed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace late {

constexpr int kDevices = 2;
constexpr int kPool = 32;     // streams that are dealt out in turn, as CUDA's are
constexpr int kStreams = 64;  // of a device: the default one, the pool, and those of transfers between processes
constexpr size_t kBytes = size_t{4} << 30;  // of a device; a page that was never written takes none of the host's

struct Stream;

// A moment in a stream: it has passed when the stream has done so many tasks.
struct Point {
  Stream* stream = nullptr;
  uint64_t number = 0;
};

// What was recorded last; `time_us` is set when the stream comes to it.
struct Event {
  Point point;
  std::shared_ptr<double> time_us;
};

struct Settings {
  uint64_t seed = 0;
  double patience_ms = 20;   // idle host after which the device goes on by itself; 0 for never
  bool synchronous = false;  // the host waits for each task as it queues it
};

void configure(const Settings& settings);  // waits for all that is queued, with open gates

Stream* stream_of(int device, int64_t id);
int64_t next_stream(int device);
int device_of(const Stream* stream);
int64_t id_of(const Stream* stream);

// A negative delay is drawn by the seed.
Point enqueue(Stream* stream, std::function<void()> kernel, double delay_us = -1);
void wait_in_stream(Stream* stream, Point point);
Point last_of(Stream* stream);
void record(Event& event, Stream* stream);

// What is queued behind a gate waits until the host has opened it; those of a stream are opened in their order.
Point gate(Stream* stream);
void open(Stream* stream);

bool query(Point point);  // each unsuccessful one lets the device do one task, if it can
void wait_quietly(Point point);  // for a part of the device that is in the host: not counted, and nothing runs for it
void wait_on_host(const std::vector<Point>& points, const std::string& reason);
void wait_for_device(int device, const std::string& reason);
std::string host_waits();  // "reason=count" lines since the last configure
std::string take_error();  // of the first kernel that failed, or ""

// Memory of a device. Its address cannot be read: what kernels read is the shadow.
void* allocate(int device, size_t bytes, Stream* stream);  // nullptr when there is no more
void release(void* address);
void use_in_stream(void* address, Stream* stream);  // not reused until the stream has done what it has now
char* shadow_of(const void* address);  // nullptr for an address of the host
int device_at(const void* address);
size_t allocated(int device);
size_t peak(int device);
void reset_peak(int device);

// Pinned memory of the host.
void* allocate_pinned(size_t bytes);
void release_pinned(void* address);
bool is_pinned(const void* address);
void use_pinned(const void* address, Point until);

}  // namespace late
