#include "policy.h"

#include <algorithm>

namespace orion {
namespace {

bool aged(const Limits& limits, const Launch& launch, uint64_t now_ns) {
  return now_ns - launch.since_ns >= limits.max_wait_ns / 2;
}

// Two kernels that use different parts of a multiprocessor run beside each other with little loss.
bool overlaps(const Limits& limits, const Kernel& kernel, const Kernel& hp) {
  return kernel.kind != KernelClass::Unknown && hp.kind != KernelClass::Unknown && kernel.kind != hp.kind &&
         kernel.multiprocessors <= limits.multiprocessor_threshold;
}

bool allowed(const Limits& limits, const History& history, const Launch& launch, uint64_t now_ns, Device& device) {
  if (device.activity(0) == Activity::Busy && !overlaps(limits, launch.kernel, history.hp_kernel)) return false;
  if (limits.mode == Mode::MultiPriority && !aged(limits, launch, now_ns)) {
    for (int lower = 1; lower < launch.client; ++lower) {
      if (device.activity(lower) == Activity::Busy) return false;
    }
  }
  const bool hp_at_work = (history.hp_launched && now_ns - history.hp_launch_ns < limits.max_wait_ns) ||
                          device.activity(0) != Activity::Idle;
  const int most = limits.max_outstanding * (hp_at_work ? 1 : kOutstandingWithoutHp);
  return device.outstanding(most) < most;
}

// Whether a is asked before b.
bool goes_before(const Limits& limits, const History& history, const Launch& a, const Launch& b, uint64_t now_ns) {
  if (limits.mode == Mode::RoundRobin && a.client != b.client) {
    const bool a_comes = a.client > history.last_client, b_comes = b.client > history.last_client;
    return a_comes != b_comes ? a_comes : a.client < b.client;
  }
  if (limits.mode == Mode::MultiPriority && a.client != b.client) {
    const bool a_aged = aged(limits, a, now_ns), b_aged = aged(limits, b, now_ns);
    if (a_aged != b_aged) return a_aged;
    if (!a_aged) return a.client < b.client;
  }
  return a.since_ns < b.since_ns;
}

}  // namespace

Choice choose(const Limits& limits, const History& history, const std::vector<Launch*>& waiting, uint64_t now_ns,
              Device& device) {
  if (waiting.size() == 1 && now_ns - waiting[0]->since_ns < limits.max_wait_ns) {  // most often; needs no order
    return {allowed(limits, history, *waiting[0], now_ns, device) ? 0 : -1, false};
  }
  std::vector<ptrdiff_t> order(waiting.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<ptrdiff_t>(i);
  const auto at = [&](ptrdiff_t i) -> const Launch& { return *waiting[static_cast<size_t>(i)]; };

  std::stable_sort(order.begin(), order.end(), [&](ptrdiff_t a, ptrdiff_t b) { return at(a).since_ns < at(b).since_ns; });
  if (!order.empty() && now_ns - at(order[0]).since_ns >= limits.max_wait_ns) return {order[0], true};

  std::stable_sort(order.begin(), order.end(),
                   [&](ptrdiff_t a, ptrdiff_t b) { return goes_before(limits, history, at(a), at(b), now_ns); });
  for (const ptrdiff_t i : order) {
    if (allowed(limits, history, at(i), now_ns, device)) return {i, false};
  }
  return {};
}

}  // namespace orion
