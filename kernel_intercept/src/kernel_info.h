// Kernel profiles by kernel name, per client.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "driver_abi.h"
#include "policy.h"

namespace orion {

class KernelInfo {
 public:
  // Forget everything.
  void reset(int clients);
  // Replace the profiles of a client (-1: of all). Returns the number of rows, or -1 and says why.
  int load(int client, const char* path, std::string& error);
  // The profile of the kernel that a launch names; unknown where none was loaded or the driver tells no name.
  Kernel find(int client, cuda::Handle function, const cuda::Driver& driver);
  // Held around fork().
  std::mutex& lock() { return mutex_; }
  uint64_t unnamed() const { return unnamed_count_.load(std::memory_order_relaxed); }

 private:
  using Table = std::unordered_map<std::string, Kernel>;

  Kernel look_up(int client, cuda::Handle function, const cuda::Driver& driver);

  std::atomic<bool> any_{false};
  std::atomic<uint64_t> version_{0};
  std::atomic<uint64_t> unnamed_count_{0};
  std::mutex mutex_;  // of what follows
  std::vector<Table> tables_;
  std::unordered_set<cuda::Handle> unnamed_;
};

}  // namespace orion
