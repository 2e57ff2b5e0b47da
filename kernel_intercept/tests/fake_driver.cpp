#include "fake_driver.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kNoDevice = 101, kInvalidHandle = 400, kNotFound = 500,
              kNotReady = 600, kCaptureUnsupported = 900, kCaptureInvalidated = 901;
constexpr uint64_t kLaunch_ns = 2'000, kQuery_ns = 500;  // of the processor
constexpr uint64_t kNever = ~uint64_t{0};

struct Event;

struct Operation {
  enum Kind { Kernel, Record, Wait } kind;
  size_t launch = 0;          // Kernel: index in the log
  Event* event = nullptr;     // Record, Wait
  uint64_t generation = 0;    // of the event: a later record does not matter to this wait
  uint64_t order = 0;
};

struct Stream {
  std::deque<Operation> operations;  // first: on the device, or next
  uint64_t served = 0;           // the order of its last kernel on the device
  bool capturing = false, invalidated = false;
  int mode = 0;
};

struct Event {
  uint64_t recorded = 0, done = 0;  // generations
};

struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

struct Actor {
  std::condition_variable turn;
  uint64_t until_ns = kNever;      // waits at most so long
  uint64_t debt_ns = 0;            // processor time that it pays where it next gives way
  uint32_t* word = nullptr;        // waits for this
  bool runnable = false;
};

std::mutex lock;  // of everything
uint64_t now = 1'000'000'000, order = 0, queries = 0;
std::list<Stream> streams;
std::list<Event> events;
std::deque<FakeLaunch> launches;
Stream* on_device = nullptr;
uint64_t device_free_ns = 0;
std::deque<Actor*> runnable;
std::vector<Actor*> sleeping;  // in the order in which they began to wait
Actor* running = nullptr;
bool in_turn = false, nothing = false, initialised = false;

thread_local Actor* self = nullptr;
thread_local int capture_mode = 0;

bool idle(const Stream& stream) { return stream.operations.empty(); }

// Do all that takes no time, and begin the kernel that was launched first of those that can begin.
void start_device() {
  for (bool moved = true; moved;) {
    moved = false;
    for (Stream& stream : streams) {
      while (!idle(stream) && &stream != on_device && stream.operations.front().kind != Operation::Kernel) {
        const Operation& first = stream.operations.front();
        if (first.kind == Operation::Wait && first.event->done < first.generation) break;
        if (first.kind == Operation::Record && first.event->done < first.generation) first.event->done = first.generation;
        stream.operations.pop_front();
        moved = true;
      }
    }
  }
  if (on_device) return;
  Stream* next = nullptr;
  for (Stream& stream : streams) {
    if (idle(stream) || stream.operations.front().kind != Operation::Kernel) continue;
    const bool sooner = !next || (in_turn ? stream.served < next->served
                                          : stream.operations.front().order < next->operations.front().order);
    if (sooner) next = &stream;
  }
  if (!next) return;
  on_device = next;
  next->served = ++order;
  FakeLaunch& launch = launches[next->operations.front().launch];
  launch.began_ns = now;
  launch.ended_ns = device_free_ns = now + launch.kernel->ns;
}

void make_runnable(Actor* actor) {
  actor->runnable = true;
  actor->word = nullptr;
  actor->until_ns = kNever;
  runnable.push_back(actor);
}

// Let time go on to the next thing that happens. false: nothing will.
bool advance() {
  start_device();
  uint64_t next = on_device ? device_free_ns : kNever;
  for (const Actor* actor : sleeping) next = std::min(next, actor->until_ns);
  if (next == kNever) return false;
  now = std::max(now, next);
  if (on_device && device_free_ns <= now) {
    on_device->operations.pop_front();
    on_device = nullptr;
    start_device();
  }
  for (size_t i = 0; i < sleeping.size();) {
    if (sleeping[i]->until_ns <= now) {
      make_runnable(sleeping[i]);
      sleeping.erase(sleeping.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return true;
}

void next_turn() {
  running = nullptr;
  while (runnable.empty()) {
    if (sleeping.empty()) return;  // all have ended
    if (!advance()) {
      std::fprintf(stderr, "fake driver: all threads wait, and nothing is left that could happen\n");
      std::_Exit(86);
    }
  }
  running = runnable.front();
  runnable.pop_front();
  running->turn.notify_one();
}

// Wait until a time, or until the word that it waits for is woken.
void give_way(std::unique_lock<std::mutex>& held, uint64_t until_ns, uint32_t* word = nullptr) {
  if (!self) return;
  Actor* me = self;
  me->runnable = false;
  me->until_ns = until_ns;
  me->word = word;
  sleeping.push_back(me);
  next_turn();
  me->turn.wait(held, [&] { return running == me; });
}

void spend(std::unique_lock<std::mutex>& held, uint64_t ns) {
  if (!self) return;
  ns += self->debt_ns;
  self->debt_ns = 0;
  give_way(held, now + ns);
}

// Wait until something on the device is done: in steps from one thing that happens to the next.
template <typename Done>
void wait_for_device(std::unique_lock<std::mutex>& held, Done done) {
  spend(held, 0);
  const uint64_t too_long = now + 10'000'000'000;
  for (;;) {
    start_device();
    if (done()) return;
    if (self && now < too_long) {
      // A stream may wait for an event that only another thread records: look again when the device has something.
      give_way(held, on_device ? device_free_ns : now + 1'000);
    } else if (self || !advance()) {
      std::fprintf(stderr, "fake driver: waits for what never happens\n");
      std::_Exit(86);
    }
  }
}

bool capture_forbids() {
  // A query by a thread that is not relaxed breaks every capture in the global mode, as the real driver's does.
  bool any = false;
  for (Stream& stream : streams) {
    if (stream.capturing && stream.mode == 0 && capture_mode != 2) any = stream.invalidated = true;
  }
  return any;
}

int launch(const char* entry, const Config& config, void* function, void** parameters, void** extra) {
  if (nothing) return kSuccess;
  std::unique_lock<std::mutex> held(lock);
  if (!function) return kInvalidHandle;
  auto* kernel = static_cast<const FakeKernel*>(function);
  spend(held, kLaunch_ns);
  if (kernel->error) return kernel->error;
  FakeLaunch record = {entry, kernel, config.stream, {}, {}, config.shared_bytes, config.attribute_count,
                       config.attributes, parameters, extra, now, 0, 0, 0};
  std::memcpy(record.grid, config.grid, sizeof record.grid);
  std::memcpy(record.block, config.block, sizeof record.block);
  static Stream* const default_stream = (streams.emplace_back(), &streams.back());
  auto* stream = reinterpret_cast<uintptr_t>(config.stream) <= 2 ? default_stream : static_cast<Stream*>(config.stream);
  record.captured = stream->capturing;
  launches.push_back(record);
  if (!stream->capturing) stream->operations.push_back({Operation::Kernel, launches.size() - 1, nullptr, 0, ++order});
  start_device();
  return kSuccess;
}

}  // namespace

// --- what the tests call

EXPORTED void fake_run(int count, void (*const* functions)(void*), void* const* arguments) {
  std::vector<std::unique_ptr<Actor>> actors;
  std::vector<std::thread> threads;
  {
    const std::unique_lock<std::mutex> held(lock);
    for (int i = 0; i < count; ++i) {
      actors.push_back(std::make_unique<Actor>());
      make_runnable(actors.back().get());
    }
  }
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([actor = actors[static_cast<size_t>(i)].get(), function = functions[i], argument = arguments[i]] {
      self = actor;
      {
        std::unique_lock<std::mutex> held(lock);
        actor->turn.wait(held, [&] { return running == actor; });
      }
      function(argument);
      const std::unique_lock<std::mutex> held(lock);
      self = nullptr;
      next_turn();
    });
  }
  {
    const std::unique_lock<std::mutex> held(lock);
    next_turn();
  }
  for (std::thread& thread : threads) thread.join();
}

EXPORTED void fake_sleep(uint64_t ns) {
  std::unique_lock<std::mutex> held(lock);
  spend(held, ns);
}

EXPORTED uint64_t fake_now(void) {
  const std::unique_lock<std::mutex> held(lock);
  return now;
}

EXPORTED void fake_wait(uint32_t* word, uint64_t ns) {
  std::unique_lock<std::mutex> held(lock);
  if (__atomic_load_n(word, __ATOMIC_ACQUIRE)) return;
  if (self) {
    give_way(held, now + ns, word);
  } else if (!advance()) {
    now += ns;
  }
}

EXPORTED void fake_wake(uint32_t* word) {
  const std::unique_lock<std::mutex> held(lock);
  for (size_t i = 0; i < sleeping.size(); ++i) {
    if (sleeping[i]->word != word) continue;
    make_runnable(sleeping[i]);
    sleeping.erase(sleeping.begin() + static_cast<ptrdiff_t>(i));
    return;
  }
}

EXPORTED size_t fake_launches(void) {
  const std::unique_lock<std::mutex> held(lock);
  return launches.size();
}

EXPORTED FakeLaunch fake_launch(size_t index) {
  const std::unique_lock<std::mutex> held(lock);
  return launches.at(index);
}

EXPORTED void fake_forget_launches(void) {
  const std::unique_lock<std::mutex> held(lock);
  launches.clear();  // nothing may be on the device
}

EXPORTED uint64_t fake_stream_queries(void) {
  const std::unique_lock<std::mutex> held(lock);
  return queries;
}

EXPORTED void fake_serve_in_turn(void) {
  const std::unique_lock<std::mutex> held(lock);
  in_turn = true;
}

EXPORTED void fake_hold(void* event) {
  const std::unique_lock<std::mutex> held(lock);
  ++static_cast<Event*>(event)->recorded;
}

EXPORTED void fake_release(void* event) {
  const std::unique_lock<std::mutex> held(lock);
  static_cast<Event*>(event)->done = static_cast<Event*>(event)->recorded;
  start_device();
}

EXPORTED void fake_do_nothing(void) { nothing = true; }

// --- the driver

EXPORTED int cuInit(unsigned) {
  initialised = true;
  return std::getenv("FAKE_NO_DEVICE") ? 100 : kSuccess;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
  if (!initialised) return kNotInitialized;
  if (ordinal != 0) return kNoDevice;
  *device = 0;
  return kSuccess;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 132 : 0;
  return kSuccess;
}

EXPORTED int cuStreamCreate(void** stream, unsigned) {
  const std::unique_lock<std::mutex> held(lock);
  streams.emplace_back();
  *stream = &streams.back();
  return kSuccess;
}

EXPORTED int cuStreamQuery(void* stream) {
  const std::unique_lock<std::mutex> held(lock);
  ++queries;
  if (nothing) return kSuccess;
  // Costs time, but gives not way: the caller may hold a lock.
  if (self) self->debt_ns += kQuery_ns;
  auto& asked = *static_cast<Stream*>(stream);
  if (asked.capturing) {
    asked.invalidated = true;
    return kCaptureUnsupported;
  }
  if (capture_forbids()) return kCaptureUnsupported;
  start_device();
  return idle(asked) ? kSuccess : kNotReady;
}

EXPORTED int cuStreamSynchronize(void* stream) {
  std::unique_lock<std::mutex> held(lock);
  wait_for_device(held, [&] { return idle(*static_cast<Stream*>(stream)); });
  return kSuccess;
}

EXPORTED int cuStreamIsCapturing(void* stream, int* status) {
  if (nothing) {
    *status = 0;
    return kSuccess;
  }
  const std::unique_lock<std::mutex> held(lock);
  auto& asked = *static_cast<Stream*>(stream);
  *status = asked.capturing ? (asked.invalidated ? 2 : 1) : 0;
  return kSuccess;
}

EXPORTED int cuStreamBeginCapture_v2(void* stream, int mode) {
  const std::unique_lock<std::mutex> held(lock);
  auto& captured = *static_cast<Stream*>(stream);
  captured.capturing = true;
  captured.invalidated = false;
  captured.mode = mode;
  return kSuccess;
}

EXPORTED int cuStreamEndCapture(void* stream, void**) {
  const std::unique_lock<std::mutex> held(lock);
  auto& captured = *static_cast<Stream*>(stream);
  captured.capturing = false;
  return captured.invalidated ? kCaptureInvalidated : kSuccess;
}

EXPORTED int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}

EXPORTED int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::unique_lock<std::mutex> held(lock);
  auto* awaited = static_cast<Event*>(event);
  static_cast<Stream*>(stream)->operations.push_back({Operation::Wait, 0, awaited, awaited->recorded, ++order});
  start_device();
  return kSuccess;
}

EXPORTED int cuEventCreate(void** event, unsigned) {
  const std::unique_lock<std::mutex> held(lock);
  events.emplace_back();
  *event = &events.back();
  return kSuccess;
}

EXPORTED int cuEventRecord(void* event, void* stream) {
  if (nothing) return kSuccess;
  const std::unique_lock<std::mutex> held(lock);
  auto* recorded = static_cast<Event*>(event);
  static_cast<Stream*>(stream)->operations.push_back({Operation::Record, 0, recorded, ++recorded->recorded, ++order});
  start_device();
  return kSuccess;
}

EXPORTED int cuEventQuery(void* event) {
  if (nothing) return kSuccess;
  const std::unique_lock<std::mutex> held(lock);
  if (self) self->debt_ns += kQuery_ns;
  if (capture_forbids()) return kCaptureUnsupported;
  start_device();
  return static_cast<Event*>(event)->done == static_cast<Event*>(event)->recorded ? kSuccess : kNotReady;
}

EXPORTED int cuEventDestroy_v2(void*) { return kSuccess; }  // the list of events keeps it: a stream may still refer to it

EXPORTED int cuKernelGetName(const char** name, void* kernel) {
  *name = static_cast<FakeKernel*>(kernel)->name;
  return *name ? kSuccess : kInvalidHandle;
}

EXPORTED int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, void* stream, void** parameters, void** extra) {
  return launch("cuLaunchKernel", {{gx, gy, gz}, {bx, by, bz}, shared, stream, nullptr, 0}, function, parameters, extra);
}

EXPORTED int cuLaunchKernel_ptsz(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
  return launch("cuLaunchKernel_ptsz", {{gx, gy, gz}, {bx, by, bz}, shared, stream, nullptr, 0}, function, parameters,
                extra);
}

EXPORTED int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  return config ? launch("cuLaunchKernelEx", *config, function, parameters, extra) : kInvalidValue;
}

EXPORTED int cuLaunchKernelEx_ptsz(const Config* config, void* function, void** parameters, void** extra) {
  return config ? launch("cuLaunchKernelEx_ptsz", *config, function, parameters, extra) : kInvalidValue;
}

EXPORTED int cuLaunchCooperativeKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                       unsigned bz, unsigned shared, void* stream, void** parameters) {
  return launch("cuLaunchCooperativeKernel", {{gx, gy, gz}, {bx, by, bz}, shared, stream, nullptr, 0}, function,
                parameters, nullptr);
}

EXPORTED int cuLaunchCooperativeKernel_ptsz(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                            unsigned by, unsigned bz, unsigned shared, void* stream, void** parameters) {
  return launch("cuLaunchCooperativeKernel_ptsz", {{gx, gy, gz}, {bx, by, bz}, shared, stream, nullptr, 0}, function,
                parameters, nullptr);
}

EXPORTED int cuLaunchFromTheFuture(void*) { return kSuccess; }

EXPORTED int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags);

EXPORTED int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
#define FUNCTION(function) {#function, reinterpret_cast<void*>(function)}
  static const std::map<std::string, void*> functions = {
      FUNCTION(cuLaunchKernel), FUNCTION(cuLaunchKernel_ptsz), FUNCTION(cuLaunchKernelEx), FUNCTION(cuLaunchKernelEx_ptsz),
      FUNCTION(cuLaunchCooperativeKernel), FUNCTION(cuLaunchCooperativeKernel_ptsz), FUNCTION(cuStreamQuery),
      FUNCTION(cuLaunchFromTheFuture), {"cuStreamBeginCapture", reinterpret_cast<void*>(cuStreamBeginCapture_v2)}};
  const auto ptsz = functions.find(std::string(name) + "_ptsz");
  const auto plain = functions.find(name);
  const auto& one = flags == 2 && ptsz != functions.end() ? ptsz : plain;
  *found = one == functions.end() ? nullptr : one->second;
  if (std::strcmp(name, "cuGetProcAddress") == 0) {  // the two differ in their parameters
    *found = version >= 12000 ? reinterpret_cast<void*>(cuGetProcAddress_v2) : reinterpret_cast<void*>(cuGetProcAddress);
  }
  if (status) *status = *found ? 0 : 1;
  return *found ? kSuccess : kNotFound;
}

EXPORTED int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, found, version, flags, nullptr);
}
