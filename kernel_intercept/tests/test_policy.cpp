// The policy as a table: who waits, what the device says, who goes.
#include <initializer_list>
#include <map>
#include <vector>

#include "check.h"
#include "policy.h"

using namespace orion;

namespace {

constexpr uint64_t us = 1'000, ms = 1'000'000, kNow = 1'000 * ms;

class SaidBy final : public Device {
 public:
  std::map<int, Activity> activities;  // idle if not named
  int launches = 0;                    // best-effort, not ended
  int asked = 0;

  Activity activity(int client) override {
    ++asked;
    const auto found = activities.find(client);
    return found == activities.end() ? Activity::Idle : found->second;
  }
  int outstanding(int) override { return launches; }
};

struct Case {
  Limits limits;
  History history;
  SaidBy device;
  std::vector<Launch> waiting;

  Choice choose() {
    std::vector<Launch*> pointers;
    for (Launch& launch : waiting) pointers.push_back(&launch);
    return orion::choose(limits, history, pointers, kNow, device);
  }
  // The client that goes, -1 for none.
  int goes() {
    const Choice choice = choose();
    return choice.index < 0 ? -1 : waiting[static_cast<size_t>(choice.index)].client;
  }
  // The clients in the order in which they go if each leaves nothing behind.
  std::vector<int> turns() {
    std::vector<int> clients;
    while (!waiting.empty()) {
      const Choice choice = choose();
      if (choice.index < 0) break;
      history.last_client = waiting[static_cast<size_t>(choice.index)].client;
      clients.push_back(history.last_client);
      waiting.erase(waiting.begin() + choice.index);
    }
    return clients;
  }
};

Launch from(int client, uint64_t waited_ns = 0, Kernel kernel = {}) { return {client, kNow - waited_ns, kernel}; }

Case with(Mode mode, std::initializer_list<Launch> waiting) {
  Case made;
  made.limits.mode = mode;
  made.limits.multiprocessor_threshold = 40;
  made.waiting = waiting;
  return made;
}

constexpr Mode kModes[] = {Mode::Fifo, Mode::MultiPriority, Mode::RoundRobin};

void nobody_waits() {
  for (const Mode mode : kModes) CHECK(with(mode, {}).goes() == -1);
}

void gives_way_to_client_0() {
  for (const Mode mode : kModes) {
    for (const auto& [activity, goes] : {std::pair{Activity::Idle, 2}, {Activity::Busy, -1}, {Activity::Parked, 2}}) {
      Case one = with(mode, {from(2, 100 * us)});
      one.device.activities[0] = activity;
      CHECK(one.goes() == goes);
    }
  }
}

void starves_no_longer_than_the_bound() {
  for (const Mode mode : kModes) {
    Case one = with(mode, {from(1, 2 * ms - 1), from(3, 2 * ms), from(2, 5 * ms)});
    one.device.activities[0] = Activity::Busy;
    one.device.launches = 1000;
    CHECK(one.goes() == 2 && one.choose().starved);  // the oldest first
    one.waiting.pop_back();
    CHECK(one.goes() == 3 && one.choose().starved);
    one.waiting.pop_back();
    CHECK(one.goes() == -1);
    one.limits.max_wait_ns = 1 * ms;
    CHECK(one.goes() == 1 && one.choose().starved);
  }
}

void orders() {
  const auto waiting = {from(3, 30 * us), from(1, 10 * us), from(2, 20 * us), from(1, 5 * us)};
  CHECK((with(Mode::Fifo, waiting).turns() == std::vector{3, 2, 1, 1}));
  CHECK((with(Mode::MultiPriority, waiting).turns() == std::vector{1, 1, 2, 3}));
  CHECK((with(Mode::RoundRobin, waiting).turns() == std::vector{1, 2, 3, 1}));
  Case one = with(Mode::RoundRobin, waiting);
  one.history.last_client = 1;
  CHECK((one.turns() == std::vector{2, 3, 1, 1}));
  // Half of the bound makes a launch old: those go first, as they came.
  CHECK((with(Mode::MultiPriority, {from(1), from(2, 1 * ms), from(3, 1500 * us)}).turns() == std::vector{3, 2, 1}));
}

void lower_clients_come_first_by_priority_only() {
  for (const Mode mode : kModes) {
    for (const auto& [activity, waits] : {std::pair{Activity::Idle, false}, {Activity::Busy, true}, {Activity::Parked, false}}) {
      Case one = with(mode, {from(2)});
      one.device.activities[1] = activity;
      CHECK(one.goes() == (waits && mode == Mode::MultiPriority ? -1 : 2));
      one.waiting[0].client = 1;  // its own work is no reason to wait
      CHECK(one.goes() == 1);
    }
    Case old = with(mode, {from(2, 1 * ms)});
    old.device.activities[1] = Activity::Busy;
    CHECK(old.goes() == 2);
    old.device.activities[0] = Activity::Busy;
    CHECK(old.goes() == -1);
  }
}

void limits_what_is_outstanding() {
  for (const Mode mode : kModes) {
    for (const bool recently : {false, true}) {
      for (const auto& [activity, most] :
           {std::pair{Activity::Idle, recently ? 2 : 32}, {Activity::Parked, 2}}) {
        Case one = with(mode, {from(1)});
        one.history.hp_launched = true;
        one.history.hp_launch_ns = kNow - (recently ? 2 * ms - 1 : 2 * ms);
        one.device.activities[0] = activity;
        one.device.launches = most - 1;
        CHECK(one.goes() == 1);
        one.device.launches = most;
        CHECK(one.goes() == -1);
      }
    }
    Case never = with(mode, {from(1)});
    never.history.hp_launch_ns = kNow;  // means nothing: client 0 has not launched
    never.device.launches = 31;
    CHECK(never.goes() == 1);
  }
}

void different_classes_overlap() {
  using Class = KernelClass;
  for (const Mode mode : kModes) {
    for (const Class hp : {Class::Unknown, Class::MemoryBound, Class::ComputeBound}) {
      for (const Class be : {Class::Unknown, Class::MemoryBound, Class::ComputeBound}) {
        for (const int multiprocessors : {40, 41}) {
          Case one = with(mode, {from(1, 0, {be, multiprocessors})});
          one.history.hp_kernel = {hp, 132};
          one.device.activities[0] = Activity::Busy;
          const bool overlap = hp != be && hp != Class::Unknown && be != Class::Unknown && multiprocessors == 40;
          CHECK(one.goes() == (overlap ? 1 : -1));
          one.device.launches = 2;
          CHECK(one.goes() == -1);
        }
      }
    }
    // Who may go is not held up by who may not.
    Case two = with(mode, {from(1, 20 * us, {KernelClass::ComputeBound, 1}), from(2, 10 * us, {KernelClass::MemoryBound, 1})});
    two.history.hp_kernel = {KernelClass::ComputeBound, 132};
    two.device.activities[0] = Activity::Busy;
    CHECK(two.goes() == 2);
  }
}

}  // namespace

int main() {
  nobody_waits();
  gives_way_to_client_0();
  starves_no_longer_than_the_bound();
  orders();
  lower_clients_come_first_by_priority_only();
  limits_what_is_outstanding();
  different_classes_overlap();
  return failures ? 1 : 0;
}
