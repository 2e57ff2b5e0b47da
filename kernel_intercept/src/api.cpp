// The C interface: checks arguments, reads the environment, lets no exception out.
#include <pthread.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <exception>
#include <string>

#include "clock.h"
#include "driver_hooks.h"
#include "log.h"
#include "orion_scheduler.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using orion::gate;

thread_local std::string last_error;
thread_local int client_idx = -1;

int fail(int status, const std::string& why) {
  last_error = why;
  orion::log(orion::Level::Info, "%s", why.c_str());  // who calls says it, or not
  return status;
}

template <typename Call>
int guarded(Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return fail(ORION_BAD_ARGUMENT, error.what());
  }
}

// An environment variable as a number from 1; `value` as it is if there is none. false: cannot be read, and why.
bool read_variable(const char* name, int& value, std::string& error) {
  const char* text = std::getenv(name);
  if (!text) return true;
  char* end = nullptr;
  errno = 0;
  const long number = std::strtol(text, &end, 10);
  if (!*text || *end || errno || number < 1 || number > 1'000'000'000) {
    error = std::string(name) + "=" + text + " is no number from 1 to 1000000000";
    return false;
  }
  value = static_cast<int>(number);
  return true;
}

void before_fork() { gate().before_fork(); }
void after_fork_in_parent() { gate().after_fork_in_parent(); }
void after_fork_in_child() { gate().after_fork_in_child(); }

int start(int num_clients, int device_id) {
  if (num_clients < 1 || num_clients > ORION_MAX_CLIENTS) {
    return fail(ORION_BAD_ARGUMENT, std::to_string(num_clients) + " clients: 1 to " + std::to_string(ORION_MAX_CLIENTS) +
                                        " are possible");
  }
  int wait_us = 2000, outstanding = 2, threshold = 0;
  std::string error;
  if (!read_variable("ORION_BE_MAX_WAIT_US", wait_us, error) ||
      !read_variable("ORION_BE_MAX_OUTSTANDING", outstanding, error) ||
      !read_variable("ORION_SM_THRESHOLD", threshold, error)) {
    return fail(ORION_BAD_ARGUMENT, error);
  }
  if (gate().running()) return fail(ORION_ALREADY_RUNNING, "the scheduler runs already");
  orion::cuda::Driver driver{};
  if (!orion::load_driver(driver, error)) return fail(ORION_NO_DRIVER, error);
  if (!orion::is_preloaded()) {
    return fail(ORION_NOT_PRELOADED,
                "the process was started without LD_PRELOAD=/absolute/path/of/libgpu_scheduler.so, so no launch passes here");
  }
  int device = 0, multiprocessors = 0;
  if (device_id < 0 || driver.device_get(&device, device_id) != orion::cuda::kSuccess ||
      driver.device_attribute(&multiprocessors, orion::cuda::kMultiprocessorCount, device) != orion::cuda::kSuccess) {
    return fail(ORION_BAD_ARGUMENT, "the CUDA driver has no device " + std::to_string(device_id));
  }
  gate().kernel_info().reset(num_clients);
  if (const char* path = std::getenv("ORION_KERNEL_INFO")) {
    if (gate().kernel_info().load(-1, path, error) < 0) return fail(ORION_BAD_ARGUMENT, error);
  }
  static const int forks = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)forks;
  orion::Limits limits;
  limits.max_wait_ns = static_cast<uint64_t>(wait_us) * 1000;
  limits.max_outstanding = outstanding;
  limits.multiprocessor_threshold = threshold ? threshold : multiprocessors / 2;
  const int status = gate().start(num_clients, limits, driver, error);
  if (status != ORION_OK) return fail(status, error);
  orion::log(orion::Level::Info, "started: %d clients, waits of at most %d us, %d best-effort launches outstanding, %d of %d "
             "multiprocessors", num_clients, wait_us, outstanding, limits.multiprocessor_threshold, multiprocessors);
  return ORION_OK;
}

}  // namespace

EXPORTED int orion_abi_version(void) { return ORION_ABI_VERSION; }

EXPORTED int orion_is_preloaded(void) { return orion::is_preloaded(); }

EXPORTED int orion_start_scheduler(int num_clients, int device_id) {
  return guarded([&]() -> int { return start(num_clients, device_id); });
}

EXPORTED void orion_stop_scheduler(void) {
  guarded([&]() -> int {
    if (!gate().running()) return ORION_OK;
    gate().stop();
    orion_totals totals;
    orion_get_totals(&totals);
    orion::log(orion::Level::Info, "stopped: %llu launches gated, %llu passed, %llu captured",
               static_cast<unsigned long long>(totals.gated), static_cast<unsigned long long>(totals.passed),
               static_cast<unsigned long long>(totals.captured));
    return ORION_OK;
  });
}

EXPORTED int orion_is_running(void) { return gate().running(); }

EXPORTED void orion_set_client_idx(int client) { client_idx = client < 0 ? -1 : client; }
EXPORTED int orion_get_client_idx(void) { return client_idx; }

EXPORTED int orion_bind_stream(int client, void* stream) {
  return guarded([&]() -> int {
    if (reinterpret_cast<uintptr_t>(stream) <= 2) {
      return fail(ORION_BAD_ARGUMENT, "a default stream cannot be bound: all threads share it");
    }
    std::string error;
    const int status = gate().bind(client, stream, error);
    return status == ORION_OK ? status : fail(status, error);
  });
}

EXPORTED int orion_unbind_stream(void* stream) {
  return guarded([&]() -> int {
    gate().unbind(stream);
    return ORION_OK;
  });
}

EXPORTED void orion_sync_client_stream(int client) {
  guarded([&]() -> int {
    for (void* stream : gate().streams(client)) gate().driver().stream_synchronize(stream);
    return ORION_OK;
  });
}

EXPORTED int orion_set_mode(int mode) {
  return guarded([&]() -> int {
    if (mode < ORION_FIFO || mode > ORION_ROUND_ROBIN) {
      return fail(ORION_BAD_ARGUMENT, "mode " + std::to_string(mode) + " is none of 0 (FIFO), 1 (MULTI_PRIORITY), 2 (ROUND_ROBIN)");
    }
    gate().set_mode(static_cast<orion::Mode>(mode));
    return ORION_OK;
  });
}

EXPORTED int orion_get_mode(void) { return static_cast<int>(gate().mode()); }

EXPORTED void orion_set_sm_threshold(int multiprocessors) { gate().set_threshold(multiprocessors); }
EXPORTED int orion_get_sm_threshold(void) { return gate().threshold(); }

EXPORTED int orion_load_kernel_info(int client, const char* csv_path) {
  return guarded([&]() -> int {
    if (!gate().running()) return fail(ORION_NOT_RUNNING, "the scheduler does not run");
    if (!csv_path || client < -1 || client >= gate().clients()) {
      return fail(ORION_BAD_ARGUMENT, "client " + std::to_string(client) + " is not one of -1 to " +
                                          std::to_string(gate().clients() - 1) + ", or there is no path");
    }
    std::string error;
    const int rows = gate().kernel_info().load(client, csv_path, error);
    return rows < 0 ? fail(ORION_BAD_ARGUMENT, error) : rows;
  });
}

EXPORTED void orion_set_client_kernels(int, int) {}

EXPORTED int orion_get_stats(int client, orion_stats* stats) {
  return guarded([&]() -> int {
    if (stats && gate().stats(client, *stats)) return ORION_OK;
    return fail(ORION_BAD_ARGUMENT, "client " + std::to_string(client) + " is not one of 0 to " +
                                        std::to_string(gate().clients() - 1) + ", or there is no room for the answer");
  });
}

EXPORTED int orion_get_totals(orion_totals* totals) {
  return guarded([&]() -> int {
    if (!totals) return fail(ORION_BAD_ARGUMENT, "there is no room for the answer");
    gate().totals(*totals);
    totals->hooked = orion::hooked();
    totals->unhooked = orion::unhooked();
    return ORION_OK;
  });
}

EXPORTED void orion_reset_state(void) { gate().reset_stats(); }

EXPORTED const char* orion_last_error(void) { return last_error.c_str(); }

EXPORTED void orion_use_clock(const orion::Clock* clock) { gate().use_clock(clock); }
