// Programs that use the driver as libraries do, to be run with libgpu_scheduler.so in LD_PRELOAD over the fake driver.
// client TEST [NUMBER [in-turn]] runs one, says on stderr what is not as it must be, and ends with status 1 then.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "clock.h"
#include "fake_driver.h"
#include "orion_scheduler.h"

// Weak: the same program runs without the library, to compare.
#pragma weak orion_abi_version
#pragma weak orion_bind_stream
#pragma weak orion_get_client_idx
#pragma weak orion_get_mode
#pragma weak orion_get_sm_threshold
#pragma weak orion_get_stats
#pragma weak orion_get_totals
#pragma weak orion_is_preloaded
#pragma weak orion_is_running
#pragma weak orion_last_error
#pragma weak orion_load_kernel_info
#pragma weak orion_reset_state
#pragma weak orion_set_client_idx
#pragma weak orion_set_mode
#pragma weak orion_set_sm_threshold
#pragma weak orion_start_scheduler
#pragma weak orion_stop_scheduler
#pragma weak orion_sync_client_stream
#pragma weak orion_unbind_stream
#pragma weak orion_use_clock

extern "C" {
int cuInit(unsigned);
int cuStreamCreate(void**, unsigned);
int cuStreamQuery(void*);
int cuStreamSynchronize(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamEndCapture(void*, void**);
int cuEventCreate(void**, unsigned);
int cuEventRecord(void*, void*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
int cuLaunchKernelEx(const void*, void*, void**, void**);
int cuLaunchCooperativeKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**);
int cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
}

namespace {

constexpr uint64_t us = 1'000, ms = 1'000'000;
constexpr uint64_t kBound_ns = 2 * ms;  // ORION_BE_MAX_WAIT_US, as it is by default

using Threads = std::vector<std::function<void()>>;

void run(const Threads& threads) {
  std::vector<void (*)(void*)> functions;
  std::vector<void*> arguments;
  for (const auto& thread : threads) {
    functions.push_back([](void* it) { (*static_cast<const std::function<void()>*>(it))(); });
    arguments.push_back(const_cast<std::function<void()>*>(&thread));
  }
  fake_run(static_cast<int>(threads.size()), functions.data(), arguments.data());
}

void* new_stream() {
  void* stream = nullptr;
  cuStreamCreate(&stream, 1);
  return stream;
}

void* new_event() {
  void* event = nullptr;
  cuEventCreate(&event, 2);
  return event;
}

int launch(FakeKernel& kernel, void* stream) {
  return cuLaunchKernel(&kernel, 1, 1, 1, 32, 1, 1, 0, stream, nullptr, nullptr);
}

orion_stats stats(int client) {
  orion_stats result{};
  CHECK(orion_get_stats(client, &result) == 0);
  return result;
}

orion_totals totals() {
  orion_totals result{};
  CHECK(orion_get_totals(&result) == 0);
  return result;
}

const orion::Clock kVirtual = {fake_now, fake_wait, fake_wake};

// Clients with a stream each; without the library only the streams.
std::vector<void*> start(int clients, int mode = ORION_ROUND_ROBIN) {
  std::vector<void*> streams;
  for (int i = 0; i < clients; ++i) streams.push_back(new_stream());
  if (!orion_start_scheduler) return streams;
  orion_use_clock(&kVirtual);
  CHECK(orion_set_mode(mode) == 0);
  CHECK(orion_start_scheduler(clients, 0) == 0);
  for (int i = 0; i < clients; ++i) CHECK(orion_bind_stream(i, streams[static_cast<size_t>(i)]) == 0);
  return streams;
}

std::vector<FakeLaunch> launches() {
  std::vector<FakeLaunch> all;
  for (size_t i = 0; i < fake_launches(); ++i) all.push_back(fake_launch(i));
  return all;
}

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
};

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using LaunchEx = int (*)(const void*, void*, void**, void**);
using Cooperative = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**);
using GetProcAddress = int (*)(const char*, void**, int, uint64_t);
using GetProcAddress2 = int (*)(const char*, void**, int, uint64_t, int*);

// Every way to the driver's launch functions leads through the gate and from there to the function that was asked for.
void routes() {
  void* stream = start(2)[1];
  FakeKernel kernel = {"k", us, 0};
  int parameter = 7;
  void* parameters[] = {&parameter};
  void* extra[] = {nullptr};
  int attributes[4];
  uint64_t expected = 0;
  const auto call = [&](const std::string& entry, void* function) {
    CHECK(function != nullptr);
    if (!function) return;
    int result = -1;
    if (entry.find("Ex") != std::string::npos) {
      const Config config = {{1, 2, 3}, {4, 5, 6}, 7, stream, attributes, 4};
      result = reinterpret_cast<LaunchEx>(function)(&config, &kernel, parameters, extra);
    } else if (entry.find("Cooperative") != std::string::npos) {
      result = reinterpret_cast<Cooperative>(function)(&kernel, 1, 2, 3, 4, 5, 6, 7, stream, parameters);
    } else {
      result = reinterpret_cast<Launch>(function)(&kernel, 1, 2, 3, 4, 5, 6, 7, stream, parameters, extra);
    }
    CHECK(result == 0);
    CHECK(stats(1).submitted == ++expected);
    const FakeLaunch last = fake_launch(fake_launches() - 1);
    if (entry != last.entry) {
      ++failures;
      std::fprintf(stderr, "%s was called for %s\n", last.entry, entry.c_str());
    }
    CHECK(last.kernel == &kernel && last.stream == stream && last.parameters == parameters && last.shared_bytes == 7);
    for (unsigned i = 0; i < 3; ++i) CHECK(last.grid[i] == i + 1 && last.block[i] == i + 4);
    if (entry.find("Ex") != std::string::npos) CHECK(last.attributes == attributes && last.attribute_count == 4);
    if (entry.find("Cooperative") == std::string::npos) CHECK(last.extra == extra);
    cuStreamSynchronize(stream);
  };

  call("cuLaunchKernel", reinterpret_cast<void*>(cuLaunchKernel));  // linked
  call("cuLaunchKernelEx", reinterpret_cast<void*>(cuLaunchKernelEx));
  call("cuLaunchCooperativeKernel", reinterpret_cast<void*>(cuLaunchCooperativeKernel));

  const std::vector<std::string> names = {"cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"};
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  uint64_t hooked = totals().hooked;
  for (const std::string& name : names) {
    call(name, dlsym(library, name.c_str()));
    call(name + "_ptsz", dlsym(library, (name + "_ptsz").c_str()));
    call(name, dlsym(RTLD_DEFAULT, name.c_str()));
  }
  CHECK(totals().hooked == hooked + 9);

  const auto first = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress"));
  const auto second = reinterpret_cast<GetProcAddress2>(dlsym(library, "cuGetProcAddress_v2"));
  void *first_again = nullptr, *second_again = nullptr;
  CHECK(first("cuGetProcAddress", &first_again, 11030, 0) == 0);
  CHECK(second("cuGetProcAddress", &second_again, 13000, 0, nullptr) == 0);
  for (const std::string& name : names) {
    for (const uint64_t flags : {0, 1, 2}) {
      const std::string entry = flags == 2 ? name + "_ptsz" : name;
      for (const GetProcAddress one : {first, reinterpret_cast<GetProcAddress>(first_again)}) {
        void* found = nullptr;
        CHECK(one(name.c_str(), &found, 11030, flags) == 0);
        call(entry, found);
      }
      for (const GetProcAddress2 one : {second, reinterpret_cast<GetProcAddress2>(second_again), cuGetProcAddress_v2}) {
        void* found = nullptr;
        int status = -1;
        CHECK(one(name.c_str(), &found, 13000, flags, &status) == 0 && status == 0);
        call(entry, found);
      }
    }
  }

  // Others are as they were, and what is new is told of.
  void *query = nullptr, *future = nullptr, *none = &query;
  CHECK(second("cuStreamQuery", &query, 13000, 0, nullptr) == 0 && query == dlsym(library, "cuStreamQuery"));
  CHECK(totals().unhooked == 0);
  CHECK(second("cuLaunchFromTheFuture", &future, 13000, 0, nullptr) == 0 && future);
  CHECK(dlsym(library, "cuLaunchFromTheFuture") == future);
  CHECK(totals().unhooked == 2);
  CHECK(second("cuNothing", &none, 13000, 0, nullptr) == 500 && none == nullptr);
  CHECK(dlsym(library, "cuLaunchNothing") == nullptr);
  CHECK(dlsym(RTLD_DEFAULT, "dlsym") == reinterpret_cast<void*>(dlsym));
  CHECK(orion_is_preloaded() == 1);
}

// What the driver answers is what the caller gets.
void errors() {
  const auto streams = start(2);
  FakeKernel bad = {"bad", us, 719}, good = {"good", us, 0};
  for (void* stream : streams) {
    CHECK(launch(bad, stream) == 719);
    CHECK(cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr) == 400);
    CHECK(launch(good, stream) == 0);
  }
  CHECK(cuLaunchKernelEx(nullptr, &good, nullptr, nullptr) == 1);
  // A failed launch leaves nothing behind that others would wait for.
  orion_reset_state();
  run({[&] {
    cuStreamSynchronize(streams[0]);
    launch(bad, streams[0]);
    launch(good, streams[1]);
  }});
  CHECK(stats(1).queued == 0);
}

// Launches that are nobody's, and what the interface refuses.
void passes() {
  FakeKernel kernel = {"k", us, 0};
  void* early = new_stream();
  CHECK(orion_abi_version() == ORION_ABI_VERSION);
  CHECK(std::string(orion_last_error()).empty());
  CHECK(orion_bind_stream(0, early) == ORION_NOT_RUNNING && std::strstr(orion_last_error(), "does not run"));
  CHECK(launch(kernel, early) == 0);
  CHECK(orion_start_scheduler(0, 0) == ORION_BAD_ARGUMENT && orion_start_scheduler(ORION_MAX_CLIENTS + 1, 0) == ORION_BAD_ARGUMENT);
  CHECK(orion_start_scheduler(2, 1) == ORION_BAD_ARGUMENT && std::strstr(orion_last_error(), "no device 1"));
  CHECK(orion_is_running() == 0 && orion_get_sm_threshold() == 0);

  const auto streams = start(2);
  CHECK(orion_start_scheduler(2, 0) == ORION_ALREADY_RUNNING && orion_is_running() == 1);
  CHECK(orion_get_sm_threshold() == 66);
  CHECK(launch(kernel, early) == 0 && launch(kernel, nullptr) == 0);
  CHECK(launch(kernel, reinterpret_cast<void*>(1)) == 0 && launch(kernel, reinterpret_cast<void*>(2)) == 0);
  CHECK(totals().passed == 4 && totals().gated == 0);
  for (uintptr_t stream : {0, 1, 2}) CHECK(orion_bind_stream(0, reinterpret_cast<void*>(stream)) == ORION_BAD_ARGUMENT);
  CHECK(orion_bind_stream(2, early) == ORION_BAD_ARGUMENT && orion_bind_stream(-1, early) == ORION_BAD_ARGUMENT);
  CHECK(std::strstr(orion_last_error(), "client -1 is not one of 0 to 1"));
  CHECK(orion_set_mode(3) == ORION_BAD_ARGUMENT && orion_get_mode() == ORION_ROUND_ROBIN);
  orion_stats none;
  CHECK(orion_get_stats(2, &none) == ORION_BAD_ARGUMENT && orion_get_stats(0, nullptr) == ORION_BAD_ARGUMENT);

  CHECK(orion_get_client_idx() == -1);
  orion_set_client_idx(1);
  CHECK(orion_get_client_idx() == 1);
  CHECK(launch(kernel, early) == 0 && totals().gated == 0);  // the index alone gates nothing

  CHECK(orion_bind_stream(0, early) == 0 && launch(kernel, early) == 0 && stats(0).submitted == 1);
  CHECK(orion_bind_stream(1, early) == 0 && launch(kernel, early) == 0 && stats(1).submitted == 1);  // it moved
  CHECK(orion_unbind_stream(early) == 0 && orion_unbind_stream(early) == 0);
  CHECK(launch(kernel, early) == 0 && totals().gated == 2);
  launch(kernel, streams[1]);
  orion_sync_client_stream(1);
  CHECK(cuStreamQuery(streams[1]) == 0);
  orion_reset_state();
  CHECK(totals().gated == 0 && totals().passed == 0);
  orion_stop_scheduler();
  orion_stop_scheduler();
  CHECK(orion_is_running() == 0 && launch(kernel, streams[0]) == 0 && totals().gated == 0);
}

// Work within a stream keeps its order, events their meaning, and what was waited for has ended.
void order() {
  constexpr int kClients = 4, kRounds = 60;
  const auto streams = start(kClients, ORION_MULTI_PRIORITY);
  std::vector<std::vector<FakeKernel>> kernels(kClients, std::vector<FakeKernel>(kRounds));
  std::vector<FakeKernel> after(kRounds);
  std::mt19937 random(1);
  for (auto& own : kernels) {
    for (FakeKernel& kernel : own) kernel = {"k", 5 * us + random() % (150 * us), 0};
  }
  for (FakeKernel& kernel : after) kernel = {"after", us, 0};
  Threads threads;
  for (int i = 0; i < kClients; ++i) {
    threads.push_back([&, i] {
      void* stream = streams[static_cast<size_t>(i)];
      void* event = new_event();
      for (int round = 0; round < kRounds; ++round) {
        const auto at = static_cast<size_t>(round);
        CHECK(launch(kernels[static_cast<size_t>(i)][at], stream) == 0);
        if (i == 0 && round % 3 == 0) {  // client 1's stream waits for client 0's kernel
          cuEventRecord(event, stream);
          cuStreamWaitEvent(streams[1], event, 0);
          CHECK(launch(after[at], streams[1]) == 0);  // a launch for client 1 on client 0's thread, as autograd's
        }
        if (round % 7 == 0) {
          cuStreamSynchronize(stream);
          CHECK(i == 1 || cuStreamQuery(stream) == 0);
        }
      }
    });
  }
  run(threads);
  for (void* stream : streams) cuStreamSynchronize(stream);

  std::map<void*, uint64_t> ended;
  std::map<const FakeKernel*, FakeLaunch> by_kernel;
  uint64_t device_ns = 0;
  for (const FakeLaunch& one : launches()) {
    CHECK(one.began_ns >= one.submitted_ns && one.began_ns >= ended[one.stream]);
    ended[one.stream] = one.ended_ns;
    by_kernel[one.kernel] = one;
    device_ns += one.ended_ns - one.began_ns;
  }
  CHECK(by_kernel.size() == kClients * kRounds + kRounds / 3);
  for (int i = 0; i < kClients; ++i) {
    for (size_t round = 1; round < kRounds; ++round) {
      const auto& own = kernels[static_cast<size_t>(i)];
      CHECK(by_kernel[&own[round]].began_ns >= by_kernel[&own[round - 1]].ended_ns);
    }
  }
  for (size_t round = 0; round < kRounds; round += 3) {
    CHECK(by_kernel[&after[round]].began_ns >= by_kernel[&kernels[0][round]].ended_ns);
  }
  CHECK(stats(0).queued == 0 && stats(0).submitted == kRounds);
  CHECK(stats(1).submitted == kRounds + kRounds / 3);
  for (int i = 0; i < kClients; ++i) CHECK_LESS(stats(i).max_wait_ns, kBound_ns + 100 * us);
}

// An iteration of client 0 (10 kernels of 100 us, then a wait) beside three that launch kernels of 200 us without end.
// Prints the numbers; the mode is that of the scheduler, and -1 means without the library.
void benefit(int mode) {
  constexpr int kIterations = 50, kKernels = 10;
  const auto streams = start(4, mode < 0 ? ORION_ROUND_ROBIN : mode);
  FakeKernel hp = {"hp", 100 * us, 0}, be = {"be", 200 * us, 0};
  bool done = false;
  std::vector<uint64_t> spans;
  Threads threads = {[&] {
    for (int i = 0; i < kIterations; ++i) {
      const uint64_t began = fake_now();
      for (int k = 0; k < kKernels; ++k) CHECK(launch(hp, streams[0]) == 0);
      cuStreamSynchronize(streams[0]);
      spans.push_back(fake_now() - began);
      fake_sleep(300 * us);  // the processor's work between two iterations
    }
    done = true;
  }};
  for (size_t i = 1; i < 4; ++i) {
    threads.push_back([&, i] {
      for (int k = 1; !done; ++k) {
        CHECK(launch(be, streams[i]) == 0);
        if (k % 20 == 0) cuStreamSynchronize(streams[i]);
      }
    });
  }
  run(threads);
  for (void* stream : streams) cuStreamSynchronize(stream);

  // How long a kernel of client 0 stood on a free stream while the device did somebody else's.
  uint64_t inversion = 0, previous_end = 0;
  std::map<void*, int> counts;
  for (const FakeLaunch& one : launches()) {
    ++counts[one.stream];
    if (one.stream != streams[0]) continue;
    inversion = std::max(inversion, one.began_ns - std::max(one.submitted_ns, previous_end));
    previous_end = one.ended_ns;
  }
  uint64_t sum = 0;
  for (const uint64_t span : spans) sum += span;
  std::printf("iteration_us %g\ninversion_us %g\n", static_cast<double>(sum) / kIterations / us,
              static_cast<double>(inversion) / us);
  for (int i = 1; i < 4; ++i) std::printf("client_%d %d\n", i, counts[streams[static_cast<size_t>(i)]]);
  if (mode < 0) return;
  uint64_t starved = 0, wait = 0;
  for (int i = 1; i < 4; ++i) {
    starved += stats(i).starved;
    wait = std::max(wait, stats(i).max_wait_ns);
    CHECK(stats(i).submitted == static_cast<uint64_t>(counts[streams[static_cast<size_t>(i)]]));
  }
  CHECK(stats(0).queued == 0);
  std::printf("starved %d\nmax_wait_us %g\n", static_cast<int>(starved), static_cast<double>(wait) / us);
}

// Without client 0 at work: the order among best-effort clients, by mode.
void fairness(int mode) {
  const auto streams = start(4, mode);
  FakeKernel be = {"be", 50 * us, 0};
  Threads threads;
  const uint64_t end = fake_now() + 60 * ms;
  for (size_t i = 1; i < 4; ++i) {
    threads.push_back([&, i] {
      while (fake_now() < end) CHECK(launch(be, streams[i]) == 0);
    });
  }
  run(threads);
  for (int i = 1; i < 4; ++i) {
    std::printf("client_%d %d\n", i, static_cast<int>(stats(i).submitted));
    CHECK_LESS(stats(i).max_wait_ns, kBound_ns + 100 * us);
  }
}

// Client 0's stream waits for an event that only client 1 records, after a launch that waits for client 0.
void cycle() {
  const auto streams = start(2);
  FakeKernel long_one = {"long", 10 * ms, 0}, short_one = {"short", 10 * us, 0};
  void* event = new_event();
  bool recorded = false;
  run({[&] {
         launch(long_one, streams[0]);
         while (!recorded) fake_sleep(10 * us);
         cuStreamWaitEvent(streams[0], event, 0);
         launch(short_one, streams[0]);
         cuStreamSynchronize(streams[0]);
       },
       [&] {
         fake_sleep(100 * us);
         launch(short_one, streams[1]);
         cuEventRecord(event, streams[1]);
         recorded = true;
       }});
  CHECK(stats(1).queued == 1 && stats(0).submitted == 2 && cuStreamQuery(streams[0]) == 0);
  CHECK_LESS(stats(1).max_wait_ns, kBound_ns);
}

// A client that waits for something outside of the device costs the others one bound, not one per launch.
void parked(int waits) {
  const auto streams = start(3);
  FakeKernel kernel = {"k", 20 * us, 0};
  void* event = new_event();
  run({[&] {
         fake_hold(event);
         cuStreamWaitEvent(streams[static_cast<size_t>(waits)], event, 0);
         for (int i = 0; i < 2; ++i) launch(kernel, streams[static_cast<size_t>(waits)]);
         fake_sleep(60 * ms);
         fake_release(event);
       },
       [&] {
         fake_sleep(100 * us);
         const uint64_t began = fake_now();
         for (int i = 0; i < 500; ++i) launch(kernel, streams[static_cast<size_t>(waits ? 3 - waits : 2)]);
         cuStreamSynchronize(streams[static_cast<size_t>(waits ? 3 - waits : 2)]);
         CHECK_LESS(fake_now() - began, 30 * ms);  // 10 ms of work
       }});
  CHECK_LESS(stats(1).starved + stats(2).starved, 2);
}

// A client 0 whose thread waits for much work that it has launched is not parked: the work goes on. The others launch a
// kernel per bound, no more, also on a device that serves them at once.
void long_queue() {
  fake_serve_in_turn();
  const auto streams = start(2);
  FakeKernel hp = {"hp", 50 * us, 0}, be = {"be", 50 * us, 0};
  bool launched = false, ended = false;
  uint64_t span = 0;
  run({[&] {
         for (int i = 0; i < 1200; ++i) {  // nobody looks at the marks meanwhile
           launch(hp, streams[0]);
           if (i % 100 == 99) cuStreamSynchronize(streams[0]);
         }
         for (int i = 0; i < 600; ++i) launch(hp, streams[0]);
         launched = true;
         const uint64_t began = fake_now();
         cuStreamSynchronize(streams[0]);
         span = fake_now() - began;
         ended = true;
       },
       [&] {
         while (!launched) fake_sleep(10 * us);
         while (!ended) launch(be, streams[1]);
       }});
  CHECK_LESS(stats(1).submitted, 30 * ms / kBound_ns + 3);
  CHECK_LESS(stats(1).submitted - 3, stats(1).starved);
  CHECK_LESS(span, 31 * ms);
}

// Start and stop while others launch, bind and unbind.
void churn() {
  FakeKernel kernel = {"k", 30 * us, 0};
  const auto streams = start(4);
  bool done = false;
  Threads threads = {[&] {
    for (int i = 0; i < 100; ++i) {
      fake_sleep(300 * us);
      orion_stop_scheduler();
      if (i % 3 == 0) fake_sleep(200 * us);
      CHECK(orion_start_scheduler(4, 0) == 0);
      for (int c = 0; c < 4; ++c) CHECK(orion_bind_stream(c, streams[static_cast<size_t>(c)]) == 0);
      CHECK(totals().gated <= 4);  // of others, since the start
      if (i % 5 == 0) CHECK(orion_unbind_stream(streams[2]) == 0);
    }
    done = true;
  }};
  size_t count = 0;
  for (void* stream : streams) {
    threads.push_back([&, stream] {
      for (; !done; ++count) {
        CHECK(launch(kernel, stream) == 0);
        fake_sleep(20 * us);
      }
      cuStreamSynchronize(stream);
    });
  }
  run(threads);
  CHECK(fake_launches() == count);
  for (int i = 0; i < 4; ++i) CHECK(stats(i).waiting == 0);
  // What is outstanding is still counted right.
  orion_bind_stream(2, streams[2]);
  orion_reset_state();
  run({[&] {
    launch(kernel, streams[0]);
    cuStreamSynchronize(streams[0]);
    for (int i = 0; i < 3; ++i) launch(kernel, streams[static_cast<size_t>(i + 1)]);
  }});
  CHECK(stats(1).queued == 0 && stats(2).queued == 0 && stats(3).queued == 1);
  for (void* stream : streams) cuStreamSynchronize(stream);
  orion_stop_scheduler();
  for (void* stream : streams) CHECK(launch(kernel, stream) == 0);
}

// A child after fork() launches without the gate, also where the parent's launches wait; it may start its own.
void forked() {
  const auto streams = start(2);
  FakeKernel kernel = {"k", 5 * ms, 0};
  int status = -1;
  run({[&] {
         for (int i = 0; i < 3; ++i) launch(kernel, streams[0]);
         fake_sleep(100 * us);
         CHECK(stats(1).waiting == 1);
         const pid_t child = fork();
         if (child == 0) {
           // The fake driver's threads are not in the child: it may only be asked what takes no time.
           bool well = orion_is_running() == 0 && orion_bind_stream(1, streams[1]) == ORION_NOT_RUNNING;
           const FakeKernel bad = {"bad", 1, 7};
           fake_do_nothing();
           well = well && cuLaunchKernel(const_cast<FakeKernel*>(&bad), 1, 1, 1, 1, 1, 1, 0, streams[1], nullptr, nullptr) == 0;
           well = well && orion_start_scheduler(2, 0) == 0 && orion_bind_stream(1, streams[1]) == 0;
           well = well && launch(kernel, streams[1]) == 0 && totals().gated == 1;
           orion_stop_scheduler();
           _exit(well ? 7 : 1);
         }
         waitpid(child, &status, 0);
       },
       [&] {
         fake_sleep(10 * us);
         launch(kernel, streams[1]);
       }});
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  CHECK(orion_is_running() == 1 && stats(1).submitted == 1 && stats(0).submitted == 3);
}

// Launches under capture go through without a wait, and neither the gate's queries of their stream nor those of others
// break a capture.
void capture() {
  const auto streams = start(3, ORION_MULTI_PRIORITY);  // client 2 waits for client 1: it asks for its stream
  FakeKernel hp = {"hp", 100 * us, 0}, kernel = {"k", 10 * us, 0};
  bool done = false;
  int captures = 0;
  run({[&] {
         while (!done) {
           for (int i = 0; i < 2; ++i) launch(hp, streams[0]);
           cuStreamSynchronize(streams[0]);
           fake_sleep(100 * us);
         }
       },
       [&] {
         for (int i = 0; i < 20; ++i) {
           launch(kernel, streams[1]);  // something unfinished, that the others ask for
           for (const int mode : {0, 1, 2}) {
             CHECK(cuStreamBeginCapture_v2(streams[1], mode) == 0);
             const uint64_t began = fake_now();
             for (int k = 0; k < 5; ++k) CHECK(launch(kernel, streams[1]) == 0);
             CHECK_LESS(fake_now() - began, 20 * us);
             fake_sleep(500 * us);
             CHECK(cuStreamEndCapture(streams[1], nullptr) == 0);
             ++captures;
           }
         }
         done = true;
       },
       [&] {
         while (!done) launch(kernel, streams[2]);
       }});
  CHECK(totals().captured == static_cast<uint64_t>(captures) * 5);
  CHECK(fake_stream_queries() > 100);
}

// Compute-bound beside memory-bound need not wait; by names as the driver has them, and demangled.
void profile() {
  const auto streams = start(2);
  const char* path = std::getenv("PROFILE");
  FakeKernel compute = {"gemm", 100 * us, 0}, memory = {"_Z4copyILi4EEvPfPKf", 100 * us, 0}, wide = {"wide", 100 * us, 0},
             unknown = {"unknown", 100 * us, 0}, nameless = {nullptr, 100 * us, 0};
  const auto wait_beside = [&](FakeKernel& hp, FakeKernel& be) {
    orion_reset_state();
    run({[&] {
           for (int i = 0; i < 5; ++i) launch(hp, streams[0]);
           cuStreamSynchronize(streams[0]);
         },
         [&] {
           fake_sleep(20 * us);
           launch(be, streams[1]);
           cuStreamSynchronize(streams[1]);
         }});
    return stats(1).max_wait_ns;
  };
  CHECK(wait_beside(compute, memory) > 400 * us);
  CHECK(orion_load_kernel_info(2, path) == ORION_BAD_ARGUMENT && orion_load_kernel_info(0, nullptr) == ORION_BAD_ARGUMENT);
  CHECK(orion_load_kernel_info(-1, "/nowhere") == ORION_BAD_ARGUMENT && std::strstr(orion_last_error(), "/nowhere: No such"));
  CHECK(orion_load_kernel_info(0, path) == 4);
  CHECK(wait_beside(compute, memory) > 400 * us);  // client 1's kernels are still unknown
  CHECK(orion_load_kernel_info(-1, path) == 4);
  CHECK(wait_beside(compute, memory) == 0);
  CHECK(wait_beside(memory, compute) == 0);
  CHECK(wait_beside(compute, compute) > 400 * us);
  CHECK(wait_beside(compute, wide) > 400 * us);  // memory-bound, but more than the threshold's multiprocessors
  orion_set_sm_threshold(132);
  CHECK(wait_beside(compute, wide) == 0 && orion_get_sm_threshold() == 132);
  CHECK(wait_beside(compute, unknown) > 400 * us && totals().unnamed == 0);
  CHECK(wait_beside(nameless, memory) > 400 * us && totals().unnamed == 1);
  CHECK(wait_beside(nameless, memory) > 400 * us && totals().unnamed == 1);
}

// What the environment says, or why it cannot be read.
void environment() {
  const int status = orion_start_scheduler(2, 0);
  std::printf("status %d\nthreshold %d\nerror %s\n", status, orion_get_sm_threshold(), orion_last_error());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string test = argc > 1 ? argv[1] : "";
  if (argc > 3) fake_serve_in_turn();
  const int mode = argc > 2 ? std::atoi(argv[2]) : ORION_ROUND_ROBIN;
  const std::map<std::string, std::function<void()>> tests = {
      {"routes", routes},   {"errors", errors}, {"passes", passes},  {"order", order},
      {"cycle", cycle},     {"long_queue", long_queue}, {"churn", churn}, {"forked", forked}, {"capture", capture},
      {"profile", profile}, {"environment", environment}, {"parked", [&] { parked(mode); }},
      {"benefit", [&] { benefit(mode); }}, {"fairness", [&] { fairness(mode); }},
  };
  if (!tests.count(test)) return 2;
  cuInit(0);
  tests.at(test)();
  return failures ? 1 : 0;
}
