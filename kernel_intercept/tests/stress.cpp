// The gate alone with real threads and real time, for builds with a sanitizer: clients launch, marks are read, the
// scheduler starts and stops, streams are bound and unbound, somebody reads statistics, the process forks.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "gate.h"

using namespace orion;
using namespace std::chrono_literals;

namespace {

constexpr int kClients = 4;
constexpr uint64_t kKernel_ns = 20'000;

// A device of which each stream does its kernels one after the other; streams do not share it.
struct FakeStream {
  std::atomic<uint64_t> busy_until{0};
};

struct FakeEvent {
  std::atomic<uint64_t> at{0};
};

int ok(unsigned) { return 0; }
int query(void* stream) {
  return static_cast<FakeStream*>(stream)->busy_until > kSystemClock.now_ns() ? cuda::kNotReady : 0;
}
int is_capturing(void*, int* status) { return *status = 0; }
int exchange(int*) { return 0; }
int create(void** event, unsigned) {
  *event = new FakeEvent;
  return 0;
}
int record(void* event, void* stream) {
  static_cast<FakeEvent*>(event)->at = static_cast<FakeStream*>(stream)->busy_until.load();
  return 0;
}
int query_event(void* event) { return static_cast<FakeEvent*>(event)->at > kSystemClock.now_ns() ? cuda::kNotReady : 0; }
int destroy(void* event) {
  delete static_cast<FakeEvent*>(event);
  return 0;
}
int name(const char** result, void* kernel) {
  *result = static_cast<const char*>(kernel);
  return 0;
}

Gate the_gate;
FakeStream streams[kClients];
std::atomic<bool> done{false};
std::atomic<uint64_t> launches[kClients];

void start() {
  cuda::Driver driver{};
  driver.init = ok;
  driver.stream_query = query;
  driver.stream_is_capturing = is_capturing;
  driver.exchange_capture_mode = exchange;
  driver.event_create = create;
  driver.event_record = record;
  driver.event_query = query_event;
  driver.event_destroy = destroy;
  driver.kernel_name = name;
  std::string error;
  the_gate.kernel_info().reset(kClients);
  Limits limits;
  limits.max_wait_ns = 500'000;
  CHECK(the_gate.start(kClients, limits, driver, error) == ORION_OK);
  for (int i = 0; i < kClients; ++i) CHECK(the_gate.bind(i, &streams[i], error) == ORION_OK);
}

void launch(int client) {
  static const char* const kKernels[] = {"a", "b", "c"};
  const uint64_t count = launches[client]++;
  Stream* entered = the_gate.enter(&streams[client], const_cast<char*>(kKernels[count % 3]));
  const uint64_t now = kSystemClock.now_ns();
  uint64_t busy = streams[client].busy_until;
  while (!streams[client].busy_until.compare_exchange_weak(busy, std::max(busy, now) + kKernel_ns)) {
  }
  if (entered) the_gate.leave(entered);
  if (count % 10 == 0) {
    while (query(&streams[client])) std::this_thread::yield();
  }
}

}  // namespace

int main() {
  start();
  std::vector<std::thread> threads;
  for (int client = 0; client < kClients; ++client) {
    for (int twice = 0; twice < 2; ++twice) {  // a thread and its autograd's
      threads.emplace_back([client] {
        while (!done) launch(client);
      });
    }
  }
  threads.emplace_back([] {
    while (!done) {
      orion_stats stats;
      orion_totals totals;
      for (int i = 0; i < kClients; ++i) CHECK(the_gate.stats(i, stats));
      the_gate.totals(totals);
      the_gate.set_mode(static_cast<Mode>(totals.gated % 3));
      the_gate.unbind(&streams[2]);
      std::string error;
      the_gate.bind(2, &streams[2], error);  // refused while the scheduler is stopped
      std::this_thread::sleep_for(1ms);
    }
  });
  const auto end = std::chrono::steady_clock::now() + 1500ms;
  for (int i = 0; std::chrono::steady_clock::now() < end; ++i) {
    std::this_thread::sleep_for(10ms);
    if (i % 4 == 0) the_gate.stop();
    if (i % 4 == 0) start();
#ifndef NO_FORK  // a sanitizer's own threads do not survive a fork
    the_gate.before_fork();
    const pid_t child = fork();
    if (child == 0) {
      the_gate.after_fork_in_child();
      _exit(the_gate.running() || the_gate.enter(&streams[0], nullptr) ? 1 : 7);
    }
    the_gate.after_fork_in_parent();
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
#endif
  }
  orion_stats hp, be;
  the_gate.stats(0, hp);
  the_gate.stats(1, be);
  CHECK(hp.queued == 0);
  done = true;
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kClients; ++i) {
    CHECK(launches[i] > 20);
    orion_stats stats;
    CHECK(the_gate.stats(i, stats) && stats.waiting == 0);
  }
  the_gate.stop();
  std::printf("launches %d %d %d %d\n", static_cast<int>(launches[0]), static_cast<int>(launches[1]),
              static_cast<int>(launches[2]), static_cast<int>(launches[3]));
  return failures ? 1 : 0;
}
