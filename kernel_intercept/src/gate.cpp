#include "gate.h"

#include <algorithm>

#include "log.h"

namespace orion {
namespace {

// A launch that waits looks again after a quarter of the time that it has waited: it goes at most that much too late,
// and a long wait costs few looks.
constexpr uint64_t kShortestLook_ns = 5'000, kLongestLook_ns = 100'000;

uint64_t pack(const Kernel& kernel) {
  return static_cast<uint64_t>(static_cast<uint32_t>(kernel.kind)) << 32 | static_cast<uint32_t>(kernel.multiprocessors);
}

Kernel unpack(uint64_t packed) {
  return {static_cast<KernelClass>(static_cast<int32_t>(packed >> 32)), static_cast<int>(packed & 0xffffffffu)};
}

size_t slot_of(cuda::Handle handle, size_t slots) {
  const auto bits = reinterpret_cast<uintptr_t>(handle);
  return static_cast<size_t>((bits >> 4) * 0x9E3779B97F4A7C15u >> 40) % slots;
}

}  // namespace

// What the device says in one pass of the policy: each stream is asked at most once. Under the gate's lock.
class Gate::Round final : public Device {
 public:
  Round(Gate& gate, uint64_t now_ns) : gate_(gate), now_ns_(now_ns) { ++gate_.round_; }
  ~Round() {
    if (relaxed_) gate_.driver_.exchange_capture_mode(&mode_);
  }

  Activity activity(int client) override {
    Activity result = Activity::Idle;
    for (Stream* stream : gate_.client(client).streams) {
      const Activity one = activity(*stream);
      if (one == Activity::Busy) return one;
      if (one == Activity::Parked) result = one;
    }
    return result;
  }

  int outstanding(int enough) override {
    int count = 0;
    for (int i = 1; i < gate_.clients_; ++i) {
      for (const Stream* stream : gate_.client(i).streams) count += unfinished(*stream);
    }
    if (count < enough) return count;
    count = 0;
    for (int i = 1; i < gate_.clients_ && count < enough; ++i) {
      for (Stream* stream : gate_.client(i).streams) {
        if (unfinished(*stream) && activity(*stream) == Activity::Busy) count += unfinished(*stream);
      }
    }
    return count;
  }

 private:
  static int unfinished(const Stream& stream) { return static_cast<int>(stream.entered.load() - stream.finished); }

  Activity activity(Stream& stream) {
    if (stream.round != gate_.round_) {
      stream.round = gate_.round_;
      stream.activity = ask(stream);
    }
    return stream.activity;
  }

  Activity ask(Stream& stream) {
    const uint64_t left = stream.left.load();  // first: what has left has entered
    const uint64_t entered = stream.entered.load();
    if (entered != stream.seen) {
      stream.seen = entered;
      stream.launch_ns = stream.progress_ns = now_ns_;
    }
    if (stream.finished == entered) return Activity::Idle;
    relax();
    if (entered == left) {
      int capture = cuda::kCaptureNone;
      // Under capture nothing can be asked, and nothing of it runs. An error is the client's to hear, nobody waits for it.
      if (gate_.driver_.stream_is_capturing(stream.handle, &capture) != cuda::kSuccess) return finish(stream, left);
      if (capture != cuda::kCaptureNone) return Activity::Idle;
      if (gate_.driver_.stream_query(stream.handle) != cuda::kNotReady) return finish(stream, left);
    }
    gate_.look_at_marks(stream, now_ns_);
    return now_ns_ - stream.progress_ns < gate_.limits_.max_wait_ns ? Activity::Busy : Activity::Parked;
  }

  Activity finish(Stream& stream, uint64_t left) {
    stream.finished = left;
    stream.progress_ns = now_ns_;
    return Activity::Idle;
  }

  // While any thread captures in the global mode, queries by a thread that is not in the relaxed mode break the capture.
  void relax() {
    if (relaxed_) return;
    relaxed_ = gate_.driver_.exchange_capture_mode(&mode_) == cuda::kSuccess;
  }

  Gate& gate_;
  const uint64_t now_ns_;
  bool relaxed_ = false;
  int mode_ = cuda::kCaptureRelaxed;
};

int Gate::start(int clients, const Limits& limits, const cuda::Driver& driver, std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (running()) {
    error = "the scheduler runs already";
    return ORION_ALREADY_RUNNING;
  }
  if (!driver_.init) driver_ = driver;  // a launch from before a stop may read it still
  const Mode mode = limits_.mode;
  limits_ = limits;
  limits_.mode = mode;
  clients_ = clients;
  last_client_ = 0;
  hp_kernel_ = pack({});
  waiting_.reserve(ORION_MAX_CLIENTS);
  reset_stats();
  running_.store(true, std::memory_order_release);
  return ORION_OK;
}

void Gate::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!running()) return;
  running_.store(false, std::memory_order_release);
  for (Launch* launch : waiting_) {
    auto& request = *static_cast<Request*>(launch);
    request.stream = nullptr;
    wake(request);
  }
  waiting_.clear();
  for (int i = 0; i < clients_; ++i) {
    const std::vector<Stream*> streams = client(i).streams;
    for (Stream* stream : streams) unbind_locked(*stream);
  }
}

int Gate::bind(int index, cuda::Handle handle, std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!running()) {
    error = "the scheduler does not run";
    return ORION_NOT_RUNNING;
  }
  if (index < 0 || index >= clients_) {
    error = "client " + std::to_string(index) + " is not one of 0 to " + std::to_string(clients_ - 1);
    return ORION_BAD_ARGUMENT;
  }
  Stream* stream = find(handle);
  if (stream && stream->client >= 0) unbind_locked(*stream);
  if (!stream) {
    if (used_slots_ >= kSlots / 2) {
      error = "more than " + std::to_string(kSlots / 2) + " different streams";
      return ORION_BAD_ARGUMENT;
    }
    auto made = std::make_unique<Stream>(handle);
    client(index).streams.reserve(client(index).streams.size() + 1);  // what can throw comes first
    stream = made.release();
    size_t slot = slot_of(handle, kSlots);
    while (slots_[slot].load()) slot = (slot + 1) % kSlots;
    slots_[slot].store(stream, std::memory_order_release);
    ++used_slots_;
  }
  client(index).streams.push_back(stream);
  stream->client.store(index, std::memory_order_release);
  return ORION_OK;
}

void Gate::unbind(cuda::Handle handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream* stream = find(handle);
  if (!running() || !stream || stream->client < 0) return;
  unbind_locked(*stream);
  grant_what_may_go(clock_->now_ns(), nullptr);  // somebody may have waited for it
}

void Gate::unbind_locked(Stream& stream) {
  std::vector<Stream*>& streams = client(stream.client).streams;
  streams.erase(std::find(streams.begin(), streams.end(), &stream));
  stream.client.store(-1, std::memory_order_release);
  drop_marks(stream);
  stream.finished = stream.seen = stream.left;
  stream.launch_ns = 0;
}

std::vector<cuda::Handle> Gate::streams(int index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<cuda::Handle> handles;
  if (index < 0 || index >= clients_) return handles;
  for (const Stream* stream : client(index).streams) handles.push_back(stream->handle);
  return handles;
}

Stream* Gate::find(cuda::Handle handle) const {
  for (size_t slot = slot_of(handle, kSlots);; slot = (slot + 1) % kSlots) {
    Stream* stream = slots_[slot].load(std::memory_order_acquire);
    if (!stream || stream->handle == handle) return stream;
  }
}

Stream* Gate::enter(cuda::Handle handle, cuda::Handle function) {
  if (!running()) return nullptr;
  Stream* stream = find(handle);
  const int index = stream ? stream->client.load(std::memory_order_acquire) : -1;
  if (index < 0) {
    passed_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  int capture = cuda::kCaptureNone;
  if (driver_.stream_is_capturing(handle, &capture) == cuda::kSuccess && capture != cuda::kCaptureNone) {
    captured_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  const Kernel kernel = kernel_info_.find(index, function, driver_);
  if (index == 0) {  // takes no lock that another thread may hold, and no time to read the clock
    stream->entered.fetch_add(1);
    hp_kernel_.store(pack(kernel), std::memory_order_relaxed);
    client(0).submitted.fetch_add(1, std::memory_order_relaxed);
    return stream;
  }
  Request request;
  request.client = index;
  request.since_ns = clock_->now_ns();
  request.kernel = kernel;
  request.stream = stream;
  wait_for_grant(request);
  if (request.stream) client(index).submitted.fetch_add(1, std::memory_order_relaxed);
  return request.stream;
}

void Gate::leave(Stream* stream) {
  const uint64_t left = stream->left.fetch_add(1) + 1;
  if (left - stream->last_marked.load(std::memory_order_relaxed) >= Stream::kLaunchesPerMark) mark(*stream);
}

void Gate::wait_for_grant(Request& request) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!running()) {
    request.stream = nullptr;
    return;
  }
  waiting_.push_back(&request);
  grant_what_may_go(request.since_ns, &request);
  if (request.done) return;

  Client& own = client(request.client);
  own.waiting.fetch_add(1);
  uint64_t now_ns = request.since_ns;
  while (!request.done) {
    const uint64_t waited_ns = now_ns - request.since_ns;
    uint64_t look_ns = std::clamp(waited_ns / 4, kShortestLook_ns, kLongestLook_ns);
    look_ns = std::min(look_ns, limits_.max_wait_ns - std::min(waited_ns, limits_.max_wait_ns));
    lock.unlock();
    clock_->wait(&request.done, std::max<uint64_t>(look_ns, 1));
    lock.lock();
    now_ns = clock_->now_ns();
    if (!request.done) grant_what_may_go(now_ns, &request);
  }
  const uint64_t waited_ns = now_ns - request.since_ns;
  own.waiting.fetch_sub(1);
  own.queued.fetch_add(1);
  if (request.starved) own.starved.fetch_add(1);
  own.wait_ns.fetch_add(waited_ns);
  if (waited_ns > own.max_wait_ns) own.max_wait_ns = waited_ns;
}

void Gate::grant_what_may_go(uint64_t now_ns, const Request* own) {
  if (waiting_.empty()) return;
  // Another thread may have read the clock later and come here first.
  for (const Launch* launch : waiting_) looked_ns_ = std::max(looked_ns_, launch->since_ns);
  now_ns = looked_ns_ = std::max(now_ns, looked_ns_);
  Round round(*this, now_ns);
  History history{last_client_, false, 0, unpack(hp_kernel_.load())};
  round.activity(0);
  for (const Stream* stream : client(0).streams) {
    history.hp_launched |= stream->launch_ns > 0;
    history.hp_launch_ns = std::max(history.hp_launch_ns, stream->launch_ns);
  }
  while (!waiting_.empty()) {
    const Choice choice = choose(limits_, history, waiting_, now_ns, round);
    if (choice.index < 0) return;
    auto& request = *static_cast<Request*>(waiting_[static_cast<size_t>(choice.index)]);
    waiting_.erase(waiting_.begin() + choice.index);
    request.starved = choice.starved;
    if (request.stream->client.load() >= 0) {
      request.stream->entered.fetch_add(1);
      request.stream->activity = Activity::Busy;
      request.stream->round = round_;
    } else {
      request.stream = nullptr;  // unbound while it waited
    }
    history.last_client = last_client_ = request.client;
    if (logs(Level::Trace)) {
      log(Level::Trace, "client %d goes after %.1f us%s", request.client,
          static_cast<double>(now_ns - request.since_ns) / 1e3, choice.starved ? ", starved" : "");
    }
    if (&request == own) {
      request.done = 1;  // its thread is this one: no call of the kernel to wake it
    } else {
      wake(request);
    }
  }
}

void Gate::wake(Request& request) {
  __atomic_store_n(&request.done, 1, __ATOMIC_RELEASE);
  clock_->wake(&request.done);
}

void Gate::mark(Stream& stream) {
  // A thread that looks at the marks keeps this one waiting for nothing: the next launch makes the mark.
  const std::unique_lock<std::mutex> lock(stream.marks_lock, std::try_to_lock);
  if (!lock || stream.client < 0) return;
  if (stream.next_mark - stream.first_mark == Stream::kMarks) ++stream.first_mark;  // nobody looked: the latest matter
  const uint64_t left = stream.left.load();
  Stream::Mark& mark = stream.marks[stream.next_mark % Stream::kMarks];
  if (!mark.event && driver_.event_create(&mark.event, cuda::kEventDisableTiming) != cuda::kSuccess) return;
  if (driver_.event_record(mark.event, stream.handle) != cuda::kSuccess) return;
  mark.left = left;
  stream.last_marked.store(left, std::memory_order_relaxed);
  ++stream.next_mark;
}

void Gate::look_at_marks(Stream& stream, uint64_t now_ns) {
  const std::lock_guard<std::mutex> lock(stream.marks_lock);
  while (stream.first_mark != stream.next_mark) {
    const Stream::Mark& mark = stream.marks[stream.first_mark % Stream::kMarks];
    if (driver_.event_query(mark.event) != cuda::kSuccess) return;
    if (mark.left > stream.finished) {
      stream.finished = mark.left;
      stream.progress_ns = now_ns;
    }
    ++stream.first_mark;
  }
}

void Gate::drop_marks(Stream& stream) {
  const std::lock_guard<std::mutex> lock(stream.marks_lock);
  for (Stream::Mark& mark : stream.marks) {
    if (mark.event) driver_.event_destroy(mark.event);
    mark.event = nullptr;
  }
  stream.first_mark = stream.next_mark;
  stream.last_marked.store(stream.left, std::memory_order_relaxed);
}

void Gate::set_mode(Mode mode) {
  const std::lock_guard<std::mutex> lock(mutex_);
  limits_.mode = mode;
}

Mode Gate::mode() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return limits_.mode;
}

void Gate::set_threshold(int multiprocessors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  limits_.multiprocessor_threshold = multiprocessors;
}

int Gate::threshold() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return limits_.multiprocessor_threshold;
}

bool Gate::stats(int index, orion_stats& stats) {
  if (index < 0 || index >= clients_) return false;
  const Client& own = client(index);
  stats = {own.submitted, own.queued, own.starved, own.wait_ns, own.max_wait_ns, own.waiting};
  return true;
}

void Gate::totals(orion_totals& totals) {
  totals.gated = 0;
  for (int i = 0; i < clients_; ++i) totals.gated += client(i).submitted;
  totals.passed = passed_;
  totals.captured = captured_;
  totals.unnamed = kernel_info_.unnamed();
}

void Gate::reset_stats() {
  for (Client& own : all_) {
    for (auto* count : {&own.submitted, &own.queued, &own.starved, &own.wait_ns, &own.max_wait_ns}) *count = 0;
  }
  passed_ = 0;
  captured_ = 0;
}

void Gate::before_fork() {
  mutex_.lock();
  kernel_info_.lock().lock();
}

void Gate::after_fork_in_parent() {
  kernel_info_.lock().unlock();
  mutex_.unlock();
}

void Gate::after_fork_in_child() {
  running_ = false;
  waiting_.clear();
  for (Client& own : all_) {
    own.streams.clear();
    own.waiting = 0;
  }
  // Another thread may have held a stream's lock: the child starts with new ones.
  for (std::atomic<Stream*>& slot : slots_) slot = nullptr;
  used_slots_ = 0;
  after_fork_in_parent();
}

}  // namespace orion
