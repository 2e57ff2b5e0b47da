#include "clock.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace orion {
namespace {

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

void wait(uint32_t* word, uint64_t ns) {
  // A thread's timeouts come up to 50 us late unless it says otherwise; that is longer than many kernels.
  const int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  const timespec span = {static_cast<time_t>(ns / 1'000'000'000u), static_cast<long>(ns % 1'000'000'000u)};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 0, &span, nullptr, 0);
  if (slack > 0) prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
}

void wake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

}  // namespace

const Clock kSystemClock = {now_ns, wait, wake};

}  // namespace orion
