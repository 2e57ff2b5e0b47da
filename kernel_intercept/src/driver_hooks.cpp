// Every library reaches the driver's launch functions in one of three ways: it is linked to libcuda.so.1 (Triton's
// helpers, NVRTC's users), it looks them up with dlsym, or it asks cuGetProcAddress, which it looked up with dlsym (the
// CUDA runtime, cuBLAS, cuDNN, NCCL). The library is preloaded, so its own cuLaunch* are found first by the linker, and
// its dlsym by everybody who looks something up.
#include "driver_hooks.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "log.h"

// Protected: within this library, dlsym and the others mean its own, also where it was not loaded first.
#define EXPORTED extern "C" __attribute__((visibility("protected")))

using orion::cuda::Handle;
using orion::cuda::LaunchConfig;
using orion::cuda::Result;

// _ptsz: to this version a null stream means the thread's own.
EXPORTED Result cuLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
                               void**);
EXPORTED Result cuLaunchKernel_ptsz(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle,
                                    void**, void**);
EXPORTED Result cuLaunchKernelEx(const LaunchConfig*, Handle, void**, void**);
EXPORTED Result cuLaunchKernelEx_ptsz(const LaunchConfig*, Handle, void**, void**);
EXPORTED Result cuLaunchCooperativeKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                          Handle, void**);
EXPORTED Result cuLaunchCooperativeKernel_ptsz(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                               Handle, void**);
EXPORTED Result cuStreamBeginCapture_v2(Handle, int);
EXPORTED Result cuStreamBeginCapture_v2_ptsz(Handle, int);
EXPORTED Result cuStreamBeginCaptureToGraph(Handle, void*, const void*, const void*, size_t, int);
EXPORTED Result cuStreamBeginCaptureToGraph_ptsz(Handle, void*, const void*, const void*, size_t, int);
EXPORTED Result cuGetProcAddress(const char*, void**, int, uint64_t);
EXPORTED Result cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
EXPORTED void* dlsym(void* handle, const char* name) noexcept;

namespace {

using Dlsym = void* (*)(void*, const char*) noexcept;  // noexcept, or a call of it is no tail call

std::atomic<Dlsym> libc_dlsym{nullptr};

Dlsym find_libc_dlsym() {
  // dlvsym, because dlsym is ours. The version is that of the libc where libdl became part of it, or of the first.
  for (const char* version : {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"}) {
    if (void* found = dlvsym(RTLD_NEXT, "dlsym", version)) {
      libc_dlsym.store(reinterpret_cast<Dlsym>(found), std::memory_order_release);
      return reinterpret_cast<Dlsym>(found);
    }
  }
  std::abort();  // no libc that this was built for
}

inline Dlsym real_dlsym() noexcept {
  const Dlsym found = libc_dlsym.load(std::memory_order_acquire);
  return __builtin_expect(found != nullptr, 1) ? found : find_libc_dlsym();
}

struct Hook {
  const char* name;
  void* ours;
  bool launches;
  std::atomic<void*> real{nullptr};
};

enum Index {
  kLaunch, kLaunchPtsz, kLaunchEx, kLaunchExPtsz, kCooperative, kCooperativePtsz, kCapture, kCapturePtsz, kCaptureToGraph,
  kCaptureToGraphPtsz, kGetProcAddress, kGetProcAddressV2, kHooks
};

Hook hooks[kHooks] = {
    {"cuLaunchKernel", reinterpret_cast<void*>(cuLaunchKernel), true},
    {"cuLaunchKernel_ptsz", reinterpret_cast<void*>(cuLaunchKernel_ptsz), true},
    {"cuLaunchKernelEx", reinterpret_cast<void*>(cuLaunchKernelEx), true},
    {"cuLaunchKernelEx_ptsz", reinterpret_cast<void*>(cuLaunchKernelEx_ptsz), true},
    {"cuLaunchCooperativeKernel", reinterpret_cast<void*>(cuLaunchCooperativeKernel), true},
    {"cuLaunchCooperativeKernel_ptsz", reinterpret_cast<void*>(cuLaunchCooperativeKernel_ptsz), true},
    {"cuStreamBeginCapture_v2", reinterpret_cast<void*>(cuStreamBeginCapture_v2), false},
    {"cuStreamBeginCapture_v2_ptsz", reinterpret_cast<void*>(cuStreamBeginCapture_v2_ptsz), false},
    {"cuStreamBeginCaptureToGraph", reinterpret_cast<void*>(cuStreamBeginCaptureToGraph), false},
    {"cuStreamBeginCaptureToGraph_ptsz", reinterpret_cast<void*>(cuStreamBeginCaptureToGraph_ptsz), false},
    {"cuGetProcAddress", reinterpret_cast<void*>(cuGetProcAddress), false},
    {"cuGetProcAddress_v2", reinterpret_cast<void*>(cuGetProcAddress_v2), false},
};

// Known, and not gated: they launch no kernel on a stream, or are older than the streams of today's libraries.
constexpr const char* kPassing[] = {"cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync", "cuLaunchHostFunc", "cuLaunchHostFunc_v2",
                                    "cuLaunchHostFunc_ptsz", "cuLaunchCooperativeKernelMultiDevice"};

std::atomic<uint64_t> hooked_count{0}, unhooked_count{0};

Hook* find_hook(const char* name) {
  for (Hook& hook : hooks) {
    if (!std::strcmp(hook.name, name)) return &hook;
  }
  return nullptr;
}

void note_unknown(const char* name) {
  if (std::strncmp(name, "cuLaunch", 8)) return;
  for (const char* known : kPassing) {
    if (!std::strcmp(name, known)) return;
  }
  unhooked_count.fetch_add(1, std::memory_order_relaxed);
  orion::log(orion::Level::Warn, "a library looked up %s, which is not gated", name);
}

// Ours, for what the driver gave.
void* put_before(Hook& hook, void* found) {
  if (found != hook.ours) hook.real.store(found, std::memory_order_release);
  if (hook.launches) hooked_count.fetch_add(1, std::memory_order_relaxed);
  orion::log(orion::Level::Debug, "a library looked up %s and received the gated one", hook.name);
  return hook.ours;
}

// The driver's function, also for a caller that is linked to libcuda.so.1 and has looked up nothing.
void* real(Index index) {
  Hook& hook = hooks[index];
  void* found = hook.real.load(std::memory_order_acquire);
  if (found) return found;
  found = real_dlsym()(RTLD_NEXT, hook.name);
  if (!found) {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library) found = real_dlsym()(library, hook.name);
  }
  if (found == hook.ours) found = nullptr;
  if (found) hook.real.store(found, std::memory_order_release);
  return found;
}

template <typename Function>
Function real_function(Index index, Function) {
  return reinterpret_cast<Function>(real(index));
}

template <typename Call>
Result gated(Handle stream, Handle function, Call call) {
  orion::Stream* entered = orion::gate().enter(stream, function);
  const Result result = call();
  if (entered) orion::gate().leave(entered);
  return result;
}

// What cuGetProcAddress found for a name without version and _ptsz; by address, or where that is new, by the flags.
void* put_before_proc_address(const char* name, void* found, int version, uint64_t flags) {
  const auto either = [&](Index plain, Index ptsz) {
    const bool is_ptsz = found == real(ptsz) || (found != real(plain) && flags == orion::cuda::kPerThreadDefaultStream);
    return put_before(hooks[is_ptsz ? ptsz : plain], found);
  };
  if (!std::strcmp(name, "cuLaunchKernel")) return either(kLaunch, kLaunchPtsz);
  if (!std::strcmp(name, "cuLaunchKernelEx")) return either(kLaunchEx, kLaunchExPtsz);
  if (!std::strcmp(name, "cuLaunchCooperativeKernel")) return either(kCooperative, kCooperativePtsz);
  // The first version of this has no mode and is older than CUDA 10.1.
  if (!std::strcmp(name, "cuStreamBeginCapture") && version >= 10010) return either(kCapture, kCapturePtsz);
  if (!std::strcmp(name, "cuStreamBeginCaptureToGraph")) return either(kCaptureToGraph, kCaptureToGraphPtsz);
  if (!std::strcmp(name, "cuGetProcAddress")) {
    return put_before(hooks[version >= 12000 ? kGetProcAddressV2 : kGetProcAddress], found);
  }
  if (Hook* hook = find_hook(name)) return put_before(*hook, found);
  note_unknown(name);
  return found;
}

__attribute__((noinline)) void* hooked_dlsym(void* handle, const char* name) noexcept {
  void* found = real_dlsym()(handle, name);
  Hook* hook = found ? find_hook(name) : nullptr;
  if (!hook) {
    if (found) note_unknown(name);
    return found;
  }
  // Where the search found this library's own function, there must also be a driver behind it.
  if (found == hook->ours && !real(static_cast<Index>(hook - hooks))) return nullptr;
  return put_before(*hook, found);
}

}  // namespace

// Others than those that are hooked, and RTLD_NEXT for all, by a tail call: libc looks at who called.
EXPORTED void* dlsym(void* handle, const char* name) noexcept {
  const bool ours = handle != RTLD_NEXT && name[0] == 'c' && name[1] == 'u' &&
                    (!std::strncmp(name + 2, "Launch", 6) || !std::strncmp(name + 2, "GetProc", 7) ||
                     !std::strncmp(name + 2, "StreamBegin", 11));
  if (__builtin_expect(ours, 0)) return hooked_dlsym(handle, name);
  return real_dlsym()(handle, name);
}

#define REAL(index, function)                                        \
  const auto next = real_function(index, function);                  \
  if (!next) return orion::cuda::kNotInitialized

#define LAUNCH(function, index)                                                                                           \
  EXPORTED Result function(Handle kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,   \
                           unsigned shared, Handle stream, void** parameters, void** extra) {                             \
    REAL(index, function);                                                                                                \
    return gated(stream, kernel, [&] { return next(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra); });\
  }

#define LAUNCH_EX(function, index)                                                                            \
  EXPORTED Result function(const LaunchConfig* config, Handle kernel, void** parameters, void** extra) {      \
    REAL(index, function);                                                                                    \
    return gated(config ? config->stream : nullptr, kernel, [&] { return next(config, kernel, parameters, extra); }); \
  }

#define LAUNCH_COOPERATIVE(function, index)                                                                             \
  EXPORTED Result function(Handle kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                           unsigned shared, Handle stream, void** parameters) {                                         \
    REAL(index, function);                                                                                              \
    return gated(stream, kernel, [&] { return next(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters); });     \
  }

#define CAPTURE(function, index)                                         \
  EXPORTED Result function(Handle stream, int mode) {                    \
    REAL(index, function);                                               \
    const std::lock_guard<std::mutex> lock(orion::gate().lock());        \
    return next(stream, mode);                                           \
  }

#define CAPTURE_TO_GRAPH(function, index)                                                                    \
  EXPORTED Result function(Handle stream, void* graph, const void* nodes, const void* edges, size_t count, int mode) { \
    REAL(index, function);                                                                                   \
    const std::lock_guard<std::mutex> lock(orion::gate().lock());                                            \
    return next(stream, graph, nodes, edges, count, mode);                                                   \
  }

LAUNCH(cuLaunchKernel, kLaunch)
LAUNCH(cuLaunchKernel_ptsz, kLaunchPtsz)
LAUNCH_EX(cuLaunchKernelEx, kLaunchEx)
LAUNCH_EX(cuLaunchKernelEx_ptsz, kLaunchExPtsz)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, kCooperative)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, kCooperativePtsz)
CAPTURE(cuStreamBeginCapture_v2, kCapture)
CAPTURE(cuStreamBeginCapture_v2_ptsz, kCapturePtsz)
CAPTURE_TO_GRAPH(cuStreamBeginCaptureToGraph, kCaptureToGraph)
CAPTURE_TO_GRAPH(cuStreamBeginCaptureToGraph_ptsz, kCaptureToGraphPtsz)

EXPORTED Result cuGetProcAddress(const char* name, void** found, int version, uint64_t flags) {
  REAL(kGetProcAddress, cuGetProcAddress);
  const Result result = next(name, found, version, flags);
  if (result == orion::cuda::kSuccess && name && found && *found) {
    *found = put_before_proc_address(name, *found, version, flags);
  }
  return result;
}

EXPORTED Result cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
  REAL(kGetProcAddressV2, cuGetProcAddress_v2);
  const Result result = next(name, found, version, flags, status);
  if (result == orion::cuda::kSuccess && name && found && *found) {
    *found = put_before_proc_address(name, *found, version, flags);
  }
  return result;
}

namespace orion {

Gate& gate() {
  alignas(Gate) static std::array<char, sizeof(Gate)> room;
  static Gate* const made = new (room.data()) Gate;
  return *made;
}

bool is_preloaded() { return real_dlsym()(RTLD_DEFAULT, "dlsym") == reinterpret_cast<void*>(dlsym); }

bool load_driver(cuda::Driver& driver, std::string& error) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    error = std::string("no CUDA driver: ") + (why ? why : "libcuda.so.1 does not load");
    return false;
  }
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name, bool needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(real_dlsym()(library, name));
    if (!function && needed) missing = name;
  };
  find(driver.init, "cuInit");
  find(driver.device_get, "cuDeviceGet");
  find(driver.device_attribute, "cuDeviceGetAttribute");
  find(driver.stream_query, "cuStreamQuery");
  find(driver.stream_synchronize, "cuStreamSynchronize");
  find(driver.stream_is_capturing, "cuStreamIsCapturing");
  find(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(driver.event_create, "cuEventCreate");
  find(driver.event_record, "cuEventRecord");
  find(driver.event_query, "cuEventQuery");
  find(driver.event_destroy, "cuEventDestroy_v2");
  find(driver.kernel_name, "cuKernelGetName", false);
  find(driver.function_name, "cuFuncGetName", false);
  if (missing) {
    error = std::string("the CUDA driver has no ") + missing;
    return false;
  }
  const cuda::Result result = driver.init(0);
  if (result != cuda::kSuccess) {
    error = "the CUDA driver finds no device: cuInit returned " + std::to_string(result);
    return false;
  }
  return true;
}

uint64_t hooked() { return hooked_count; }
uint64_t unhooked() { return unhooked_count; }

}  // namespace orion
