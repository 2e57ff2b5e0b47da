// Prints how long a launch takes, in ns, for its caller. The fake driver below does nothing, so this is what the library
// adds and about 2 ns. launches WAY LAUNCHES, with WAY as in run.py.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fake_driver.h"
#include "orion_scheduler.h"

#pragma weak orion_bind_stream
#pragma weak orion_start_scheduler

extern "C" int cuStreamCreate(void**, unsigned);

int main(int, char** argv) {
  const std::string way = argv[1];
  const long count = std::atol(argv[2]);
  void *stream = nullptr, *other = nullptr;
  cuStreamCreate(&stream, 1);
  cuStreamCreate(&other, 1);
  fake_do_nothing();
  if (way != "none" && way != "stopped") {
    if (orion_start_scheduler(4, 0) != 0) return 1;
    if (way == "unbound" && orion_bind_stream(0, other) != 0) return 1;
    if (way == "high" && orion_bind_stream(0, stream) != 0) return 1;
    if (way == "best" && (orion_bind_stream(0, other) != 0 || orion_bind_stream(1, stream) != 0)) return 1;
  }
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  const auto launch = reinterpret_cast<Launch>(dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuLaunchKernel"));
  FakeKernel kernel = {"k", 0, 0};
  for (long i = -count / 10; i < count; ++i) {  // some first, to warm up
    static std::chrono::steady_clock::time_point began;
    if (i == 0) began = std::chrono::steady_clock::now();
    launch(&kernel, 1, 1, 1, 32, 1, 1, 0, stream, nullptr, nullptr);
    if (i == count - 1) {
      const std::chrono::duration<double, std::nano> span = std::chrono::steady_clock::now() - began;
      std::printf("%g\n", span.count() / static_cast<double>(count));
    }
  }
}
