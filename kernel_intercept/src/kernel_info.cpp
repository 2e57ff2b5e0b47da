#include "kernel_info.h"

#include <cxxabi.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace orion {
namespace {

constexpr const char* kHeader = "Name,Profile,Memory_footprint,SM_usage,Duration";

// The fields of a line: separated by commas, or in double quotes, where "" is one quote.
std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (c == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"') {
      fields.back() += line[++i];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

bool read_int(const std::string& text, long least, long most, int& value) {
  char* end = nullptr;
  errno = 0;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || errno || number < least || number > most) return false;
  value = static_cast<int>(number);
  return true;
}

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = text ? text : "";
  std::free(text);
  return result;
}

}  // namespace

void KernelInfo::reset(int clients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.assign(static_cast<size_t>(clients), {});
  unnamed_.clear();
  unnamed_count_ = 0;
  any_ = false;
  ++version_;
}

int KernelInfo::load(int client, const char* path, std::string& error) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path, "r"), std::fclose);
  std::string line;
  const auto next = [&] {
    line.clear();
    int c = std::getc(file.get());
    if (c == EOF) return false;
    for (; c != EOF && c != '\n'; c = std::getc(file.get())) line += static_cast<char>(c);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return true;
  };
  if (!file) {
    error = std::string(path) + ": " + std::strerror(errno);
    return -1;
  }
  if (!next() || line != kHeader) {
    error = std::string(path) + ": line 1 must be " + kHeader;
    return -1;
  }
  Table table;
  int rows = 0;
  for (int number = 2; next(); ++number) {
    if (line.empty()) continue;
    const std::vector<std::string> fields = split(line);
    Kernel kernel;
    int kind = 0;
    if (fields.size() != 5 || fields[0].empty() || !read_int(fields[1], -1, 1, kind) ||
        !read_int(fields[3], 0, 1 << 20, kernel.multiprocessors)) {
      error = std::string(path) + ": line " + std::to_string(number) +
              " must have five fields: a name, a profile of -1, 0 or 1, a footprint, multiprocessors (a whole number), a duration";
      return -1;
    }
    kernel.kind = static_cast<KernelClass>(kind);
    table[fields[0]] = kernel;
    ++rows;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (client < 0 || static_cast<size_t>(client) == i) tables_[i] = table;
  }
  any_ = true;
  ++version_;
  return rows;
}

Kernel KernelInfo::find(int client, cuda::Handle function, const cuda::Driver& driver) {
  if (!any_.load(std::memory_order_acquire)) return {};
  // A cache per thread: a launch of client 0 takes no lock that another thread may hold.
  struct Cache {
    uint64_t version = 0;
    int client = -1;
    std::unordered_map<cuda::Handle, Kernel> kernels;
  };
  static thread_local Cache cache;
  const uint64_t version = version_.load(std::memory_order_acquire);
  if (cache.version != version || cache.client != client) {
    cache.version = version;
    cache.client = client;
    cache.kernels.clear();
  }
  const auto found = cache.kernels.find(function);
  if (found != cache.kernels.end()) return found->second;
  return cache.kernels[function] = look_up(client, function, driver);
}

Kernel KernelInfo::look_up(int client, cuda::Handle function, const cuda::Driver& driver) {
  // The runtime library passes CUkernel handles where a CUfunction is expected; the driver takes both.
  const char* name = nullptr;
  const bool named = (driver.kernel_name && driver.kernel_name(&name, function) == cuda::kSuccess && name) ||
                     (driver.function_name && driver.function_name(&name, function) == cuda::kSuccess && name);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!named) {
    if (unnamed_.insert(function).second) ++unnamed_count_;
    return {};
  }
  if (static_cast<size_t>(client) >= tables_.size()) return {};
  const Table& table = tables_[static_cast<size_t>(client)];
  for (const std::string& key : {std::string(name), demangled(name)}) {
    const auto found = table.find(key);
    if (found != table.end()) return found->second;
  }
  return {};
}

}  // namespace orion
