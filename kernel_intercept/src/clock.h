// Time and waiting, replaceable: the tests run on the virtual clock of a fake driver.
#pragma once

#include <cstdint>

namespace orion {

struct Clock {
  uint64_t (*now_ns)();
  // Return once wake(word) is called or ns have passed; at once if *word is not 0. May return early.
  void (*wait)(uint32_t* word, uint64_t ns);
  void (*wake)(uint32_t* word);
};

extern const Clock kSystemClock;

}  // namespace orion

// Not part of the interface of orion_scheduler.h: only for tests, before the scheduler starts.
extern "C" __attribute__((visibility("default"))) void orion_use_clock(const orion::Clock* clock);
