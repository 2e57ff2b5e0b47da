// What this library needs of the CUDA driver's binary interface, so that it builds without the CUDA toolkit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace orion::cuda {

using Result = int;  // CUresult
constexpr Result kSuccess = 0;
constexpr Result kNotInitialized = 3;
constexpr Result kNotReady = 600;

constexpr int kCaptureNone = 0;                // CU_STREAM_CAPTURE_STATUS_NONE
constexpr int kCaptureRelaxed = 2;             // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kMultiprocessorCount = 16;       // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr unsigned kEventDisableTiming = 2;    // CU_EVENT_DISABLE_TIMING
constexpr uint64_t kPerThreadDefaultStream = 2;  // CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM

// Handles (CUstream, CUevent, CUfunction, CUkernel) are pointers. Streams 0, 1 and 2 are the default streams.
using Handle = void*;

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Handle stream;
  void* attributes;
  unsigned attribute_count;
};
static_assert(offsetof(LaunchConfig, stream) == 32);

#if __has_include(<cuda.h>)
}  // namespace orion::cuda
#include <cuda.h>
namespace orion::cuda {
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(kNotReady == CUDA_ERROR_NOT_READY && kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE && kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kPerThreadDefaultStream == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
#endif

// Functions of the driver that the scheduler itself calls. The last two may be missing (before CUDA 12.3): null.
struct Driver {
  Result (*init)(unsigned);
  Result (*device_get)(int*, int);
  Result (*device_attribute)(int*, int, int);
  Result (*stream_query)(Handle);
  Result (*stream_synchronize)(Handle);
  Result (*stream_is_capturing)(Handle, int*);
  Result (*exchange_capture_mode)(int*);
  Result (*event_create)(Handle*, unsigned);
  Result (*event_record)(Handle, Handle);
  Result (*event_query)(Handle);
  Result (*event_destroy)(Handle);
  Result (*kernel_name)(const char**, Handle);
  Result (*function_name)(const char**, Handle);
};

}  // namespace orion::cuda
