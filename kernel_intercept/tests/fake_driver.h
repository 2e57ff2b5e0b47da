// A CUDA driver of its own: streams, events and one serial device, on a virtual clock.
//
// Threads that fake_run() starts take turns: one runs at a time, until it launches, waits or ends. Time stands still
// while one runs and goes on when all wait, so every run of a test is the same and takes no real time. A kernel is a
// FakeKernel; the driver takes its address as a CUfunction.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct FakeKernel {
  const char* name;  // NULL: the driver tells no name
  uint64_t ns;
  int error;  // what launching it returns
} FakeKernel;

typedef struct FakeLaunch {  // what the driver was given, and when the device did it
  const char* entry;         // the driver's function that was called
  const FakeKernel* kernel;
  void* stream;
  unsigned grid[3], block[3], shared_bytes, attribute_count;
  const void *attributes, *parameters, *extra;
  uint64_t submitted_ns, began_ns, ended_ns;
  int captured;
} FakeLaunch;

// Run the functions, each on a thread of its own with its argument, until all have returned. If all wait and nothing is
// left that could happen, the process ends with status 86 and says so.
void fake_run(int count, void (*const* functions)(void*), void* const* arguments);
void fake_sleep(uint64_t ns);
uint64_t fake_now(void);
// The same as orion::Clock asks for.
void fake_wait(uint32_t* word, uint64_t ns);
void fake_wake(uint32_t* word);

// Launches so far, in the order in which they came.
size_t fake_launches(void);
FakeLaunch fake_launch(size_t index);
void fake_forget_launches(void);
uint64_t fake_stream_queries(void);

// From now on the device takes streams in turn, as a GPU may; at first it takes kernels in the order of their launches.
void fake_serve_in_turn(void);

// Streams that are told to wait for the event after hold wait until release: something outside of the device, a receive.
void fake_hold(void* event);
void fake_release(void* event);

// For measuring: launches do nothing at all from now on.
void fake_do_nothing(void);

#ifdef __cplusplus
}
#endif
