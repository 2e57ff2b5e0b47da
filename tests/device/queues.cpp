#include "queues.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

namespace late {

namespace {

constexpr int kTurns = 5;  // of which a host's patience consists
constexpr int kPoison = 0xFF;  // a NaN of every floating type, -1 of integers

struct Task {
  std::function<void()> kernel;
  Point after;
  double delay_us;
  double queued_us;
  bool is_gate = false;
};

struct Waiter {
  const std::vector<Point>& points;
  bool quiet;
};

using Lock = std::unique_lock<std::mutex>;

}  // namespace

struct Stream {
  int device;
  int64_t id;
  std::deque<Task> queue;
  uint64_t queued = 0;
  uint64_t done = 0;
  int gates = 0;   // in the queue
  int opened = 0;  // of these
  double clock_us = 0;
  uint64_t random = 0;
  bool has_thread = false;
  std::condition_variable turn;
};

namespace {

bool passed(Point point) { return point.stream == nullptr || point.stream->done >= point.number; }

// Never destroyed: the streams' threads outlive main.
struct World {
  std::mutex mutex;
  Settings settings;
  Stream streams[kDevices][kStreams];
  int dealt[kDevices] = {};
  Stream* running = nullptr;
  double running_us = 0;
  double now_us = 0;
  std::vector<const Waiter*> waiters;
  int steps = 0;           // tasks that queries ask for
  bool impatient = false;  // the host has been idle
  bool all_open = false;
  uint64_t activity = 0;
  bool has_ticker = false;
  std::condition_variable host;
  std::condition_variable ticker;
  std::map<std::string, int> waits;
  std::string error;

  World() {
    for (int device = 0; device < kDevices; ++device) {
      for (int id = 0; id < kStreams; ++id) {
        streams[device][id].device = device;
        streams[device][id].id = id;
      }
    }
  }
};

World& world() {
  static World* made = new World;
  return *made;
}

uint64_t mixed(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// Half of the kernels begin within 20 us, the others within 2 ms.
double drawn_delay(Stream& stream) {
  stream.random = mixed(stream.random);
  const double part = static_cast<double>(stream.random >> 12) / static_cast<double>(uint64_t{1} << 52);
  return 1 + (stream.random & 1 ? 20 * part : 2000 * part * part);
}

bool satisfied(const Waiter& waiter) {
  return std::all_of(waiter.points.begin(), waiter.points.end(), passed);
}

bool is_wanted(const World& w) {
  return w.impatient || w.steps > 0 ||
         std::any_of(w.waiters.begin(), w.waiters.end(),
                     [](const Waiter* waiter) { return !waiter->quiet && !satisfied(*waiter); });
}

template <class Function>
void for_each_stream(World& w, Function function) {
  for (auto& streams : w.streams) {
    for (auto& stream : streams) function(stream);
  }
}

// Gives the turn to the stream whose next task has the earliest time, if anything is wanted of the device.
void schedule(World& w) {
  if (w.running != nullptr || !is_wanted(w)) return;
  for_each_stream(w, [&](Stream& stream) {
    if (stream.queue.empty() || !passed(stream.queue.front().after)) return;
    const Task& task = stream.queue.front();
    if (task.is_gate && stream.opened == 0 && !w.all_open) return;
    const double start_us = std::max(stream.clock_us, task.queued_us) + task.delay_us;
    if (w.running == nullptr || start_us < w.running_us) {
      w.running = &stream;
      w.running_us = start_us;
    }
  });
  if (w.running != nullptr) w.running->turn.notify_one();
}

void run(Stream& stream) {
  World& w = world();
  Lock lock(w.mutex);
  while (true) {
    stream.turn.wait(lock, [&] { return w.running == &stream; });
    auto kernel = std::move(stream.queue.front().kernel);
    if (stream.queue.front().is_gate) {
      --stream.gates;
      --stream.opened;
    }
    stream.queue.pop_front();
    stream.clock_us = w.now_us = std::max(w.now_us, w.running_us);
    if (kernel) {
      lock.unlock();
      std::string error;
      try {
        kernel();
      } catch (const std::exception& caught) {
        error = caught.what();
        error = error.substr(0, error.find("\nException raised"));  // torch's trace of C++
      }
      kernel = nullptr;
      lock.lock();
      if (w.error.empty()) w.error = error;
    }
    ++stream.done;
    w.running = nullptr;
    if (w.steps > 0) --w.steps;
    schedule(w);
    if (w.running == nullptr || std::any_of(w.waiters.begin(), w.waiters.end(),
                                            [](const Waiter* waiter) { return satisfied(*waiter); })) {
      w.host.notify_all();
    }
  }
}

// Patience is over after several turns without activity, not after one long one: where others have the processors, the
// host's thread has had its turns by then.
void tick() {
  World& w = world();
  Lock lock(w.mutex);
  int idle = 0;
  while (true) {
    const uint64_t seen = w.activity;
    w.ticker.wait_for(lock, std::chrono::duration<double, std::milli>(
        w.settings.patience_ms > 0 ? w.settings.patience_ms / kTurns : 1000));
    idle = w.settings.patience_ms > 0 && w.activity == seen ? idle + 1 : 0;
    if (idle >= kTurns) {
      w.impatient = true;
      schedule(w);
    }
  }
}

void wait(World& w, Lock& lock, const std::vector<Point>& points, bool quiet = false) {
  const Waiter waiter{points, quiet};
  w.waiters.push_back(&waiter);
  schedule(w);
  w.host.wait(lock, [&] { return satisfied(waiter); });
  w.waiters.erase(std::find(w.waiters.begin(), w.waiters.end(), &waiter));
}

Point push(World& w, Lock& lock, Stream* stream, Task task) {
  if (!stream->has_thread) {
    std::thread(run, std::ref(*stream)).detach();
    stream->has_thread = true;
  }
  if (!w.has_ticker) {
    std::thread(tick).detach();
    w.has_ticker = true;
  }
  if (task.delay_us < 0) task.delay_us = drawn_delay(*stream);
  task.queued_us = w.now_us;
  stream->gates += task.is_gate;
  stream->queue.push_back(std::move(task));
  ++w.activity;
  w.impatient = false;
  const Point point{stream, ++stream->queued};
  if (w.settings.synchronous && stream->gates <= stream->opened) wait(w, lock, {point});
  return point;
}

std::vector<Point> ends(World& w, int device) {
  std::vector<Point> points;
  for (auto& stream : w.streams[device]) {
    if (stream.done < stream.queued) points.push_back({&stream, stream.queued});
  }
  return points;
}

}  // namespace

void configure(const Settings& settings) {
  World& w = world();
  Lock lock(w.mutex);
  w.all_open = true;
  for (int device = 0; device < kDevices; ++device) wait(w, lock, ends(w, device));
  w.all_open = false;
  w.settings = settings;
  w.now_us = 0;
  w.impatient = false;
  w.waits.clear();
  std::fill(std::begin(w.dealt), std::end(w.dealt), 0);
  for_each_stream(w, [&](Stream& stream) {
    stream.clock_us = 0;
    stream.opened = 0;
    stream.random = mixed(mixed(settings.seed) + static_cast<uint64_t>(kStreams * stream.device + stream.id));
  });
  w.ticker.notify_one();
}

Stream* stream_of(int device, int64_t id) { return &world().streams[device][id]; }

int64_t next_stream(int device) {
  Lock lock(world().mutex);
  return 1 + world().dealt[device]++ % kPool;
}

int device_of(const Stream* stream) { return stream->device; }
int64_t id_of(const Stream* stream) { return stream->id; }

Point enqueue(Stream* stream, std::function<void()> kernel, double delay_us) {
  Lock lock(world().mutex);
  return push(world(), lock, stream, {std::move(kernel), {}, delay_us, 0});
}

void wait_in_stream(Stream* stream, Point point) {
  Lock lock(world().mutex);
  if (!passed(point)) push(world(), lock, stream, {nullptr, point, 0, 0});
}

Point last_of(Stream* stream) {
  Lock lock(world().mutex);
  return {stream, stream->queued};
}

void record(Event& event, Stream* stream) {
  Lock lock(world().mutex);
  auto time_us = event.time_us = std::make_shared<double>(-1);
  event.point = push(world(), lock, stream, {[time_us] { *time_us = world().now_us; }, {}, 0, 0});
}

Point gate(Stream* stream) {
  Lock lock(world().mutex);
  return push(world(), lock, stream, {nullptr, {}, 0, 0, true});
}

void open(Stream* stream) {
  Lock lock(world().mutex);
  ++stream->opened;
  schedule(world());
}

bool query(Point point) {
  World& w = world();
  Lock lock(w.mutex);
  if (passed(point)) return true;
  ++w.steps;
  schedule(w);
  w.host.wait(lock, [&] { return w.steps == 0 || w.running == nullptr || passed(point); });  // a gate may be closed
  w.steps = 0;
  return false;
}

void wait_quietly(Point point) {
  Lock lock(world().mutex);
  wait(world(), lock, {point}, true);
}

void wait_on_host(const std::vector<Point>& points, const std::string& reason) {
  World& w = world();
  Lock lock(w.mutex);
  ++w.waits[reason];
  wait(w, lock, points);
}

void wait_for_device(int device, const std::string& reason) {
  World& w = world();
  Lock lock(w.mutex);
  ++w.waits[reason];
  wait(w, lock, ends(w, device));
}

std::string host_waits() {
  Lock lock(world().mutex);
  std::string lines;
  for (const auto& [reason, count] : world().waits) lines += reason + "=" + std::to_string(count) + "\n";
  return lines;
}

std::string take_error() {
  Lock lock(world().mutex);
  return std::exchange(world().error, "");
}

// -- memory -----------------------------------------------------------------------------------------------------------

namespace {

struct Block {
  char* address;
  size_t bytes;
  size_t wanted;
  Stream* owner;
  std::set<Stream*> users;
  std::vector<Point> last_uses;  // all that was queued anywhere when it was freed
};

struct Memory {
  char* address = nullptr;
  char* shadow = nullptr;
  size_t used = 0;
  size_t allocated = 0;
  size_t peak = 0;
  std::map<const void*, Block*> held;
  std::map<Stream*, std::multimap<size_t, Block*>> unused;  // blocks belong to the stream that first had them
  std::vector<std::pair<Block*, std::vector<Point>>> awaited;

  Memory() {
    const int file = memfd_create("late", 0);
    if (file < 0 || ftruncate(file, kBytes) != 0) throw std::runtime_error("no memory for the device");
    address = map(file, PROT_NONE);
    shadow = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  static char* map(int file, int access) {
    void* mapped = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("no address space for the device");
    return static_cast<char*>(mapped);
  }
};

std::mutex memory_mutex;

Memory& memory_of(int device) {
  static Memory* made = new Memory[kDevices];
  return made[device];
}

size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

bool has_passed(const Point& point) {
  Lock lock(world().mutex);
  return passed(point);
}

std::vector<Point> all_ends() {
  Lock lock(world().mutex);
  std::vector<Point> points;
  for (int device = 0; device < kDevices; ++device) {
    for (const Point& point : ends(world(), device)) points.push_back(point);
  }
  return points;
}

bool have_passed(const std::vector<Point>& points) { return std::all_of(points.begin(), points.end(), has_passed); }

// The owner may have it at once: what it queued before comes first.
void make_unused(Memory& memory, Block* block) { memory.unused[block->owner].emplace(block->bytes, block); }

}  // namespace

void* allocate(int device, size_t bytes, Stream* stream) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  Memory& memory = memory_of(device);
  auto passed_ones = std::stable_partition(memory.awaited.begin(), memory.awaited.end(), [](const auto& awaited) {
    return !std::all_of(awaited.second.begin(), awaited.second.end(), has_passed);
  });
  for (auto each = passed_ones; each != memory.awaited.end(); ++each) make_unused(memory, each->first);
  memory.awaited.erase(passed_ones, memory.awaited.end());
  const size_t size = rounded(bytes);
  auto& unused = memory.unused[stream];
  auto found = unused.lower_bound(size);
  Block* block;
  if (found != unused.end() && found->first <= 2 * size) {
    found = std::prev(unused.upper_bound(found->first));  // the latest: its last users may not have come so far
    block = found->second;
    unused.erase(found);
    char* shadow = memory.shadow + (block->address - memory.address);
    auto poison = [shadow, bytes = block->bytes] { std::memset(shadow, kPoison, bytes); };
    if (have_passed(block->last_uses)) {
      poison();
    } else {
      enqueue(stream, poison, 0);
    }
  } else {
    if (size > kBytes - memory.used) return nullptr;
    block = new Block{memory.address + memory.used, size, 0, stream, {}, {}};
    std::memset(memory.shadow + memory.used, kPoison, size);
    memory.used += size;
  }
  block->wanted = size;
  memory.held[block->address] = block;
  memory.allocated += size;
  memory.peak = std::max(memory.peak, memory.allocated);
  return block->address;
}

void release(void* address) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  Memory& memory = memory_of(device_at(address));
  Block* block = memory.held.at(address);
  memory.held.erase(address);
  memory.allocated -= block->wanted;
  std::vector<Point> points;
  for (Stream* user : block->users) points.push_back(last_of(user));
  block->users.clear();
  block->last_uses = all_ends();
  if (std::all_of(points.begin(), points.end(), has_passed)) {
    make_unused(memory, block);
  } else {
    memory.awaited.emplace_back(block, std::move(points));
  }
}

void use_in_stream(void* address, Stream* stream) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  Block* block = memory_of(device_at(address)).held.at(address);
  if (stream != block->owner) block->users.insert(stream);
}

int device_at(const void* address) {
  for (int device = 0; device < kDevices; ++device) {
    const char* first = memory_of(device).address;
    if (address >= first && address < first + kBytes) return device;
  }
  return -1;
}

char* shadow_of(const void* address) {
  const int device = device_at(address);
  if (device < 0) return nullptr;
  return memory_of(device).shadow + (static_cast<const char*>(address) - memory_of(device).address);
}

size_t allocated(int device) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  return memory_of(device).allocated;
}

size_t peak(int device) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  return memory_of(device).peak;
}

void reset_peak(int device) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  memory_of(device).peak = memory_of(device).allocated;
}

// -- pinned memory ----------------------------------------------------------------------------------------------------

namespace {

struct Pinned {
  size_t bytes;
  std::vector<Point> until;
};

struct PinnedMemory {
  std::map<char*, Pinned> held;
  std::multimap<size_t, char*> unused;
  std::vector<std::pair<char*, Pinned>> awaited;

  std::map<char*, Pinned>::iterator find(const void* address) {
    auto found = held.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (found == held.begin() || address >= (--found)->first + found->second.bytes) return held.end();
    return found;
  }
};

PinnedMemory& pinned() {
  static PinnedMemory* made = new PinnedMemory;
  return *made;
}

}  // namespace

void* allocate_pinned(size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto& awaited = pinned().awaited;
  for (size_t i = 0; i < awaited.size();) {
    auto& [address, block] = awaited[i];
    if (!std::all_of(block.until.begin(), block.until.end(), has_passed)) {
      ++i;
      continue;
    }
    std::memset(address, kPoison, block.bytes);
    pinned().unused.emplace(block.bytes, address);
    awaited.erase(awaited.begin() + static_cast<std::ptrdiff_t>(i));
  }
  const size_t size = (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096;
  char* address;
  if (auto found = pinned().unused.find(size); found != pinned().unused.end()) {
    address = found->second;
    pinned().unused.erase(found);
  } else {
    address = static_cast<char*>(std::aligned_alloc(4096, size));
    if (address == nullptr) throw std::bad_alloc();
    std::memset(address, kPoison, size);
  }
  pinned().held.emplace(address, Pinned{size, {}});
  return address;
}

void release_pinned(void* address) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto found = pinned().held.find(static_cast<char*>(address));
  pinned().awaited.emplace_back(found->first, std::move(found->second));
  pinned().held.erase(found);
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  return pinned().find(address) != pinned().held.end();
}

void use_pinned(const void* address, Point until) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto found = pinned().find(address);
  if (found != pinned().held.end()) found->second.until.push_back(until);
}

}  // namespace late
