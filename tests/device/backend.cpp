// The device of queues.h as torch's PrivateUse1. An operation takes its shapes from the meta kernel; the processor's
// kernel runs later, in the stream's thread, on tensors over the shadow of the same memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "queues.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kLate = c10::DeviceType::PrivateUse1;

// -- which device and stream take the work of a thread ----------------------------------------------------------------

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_streams[late::kDevices] = {};

DeviceIndex definite(const Device& device) { return device.has_index() ? device.index() : current_device; }

DeviceIndex exchange_device(DeviceIndex index) {
  TORCH_CHECK(index < late::kDevices, "there are ", late::kDevices, " devices, but device ", int{index}, " is asked for");
  return index < 0 ? current_device : std::exchange(current_device, index);
}

late::Stream* current_stream(DeviceIndex index) { return late::stream_of(index, current_streams[index]); }
late::Stream* stream_at(const c10::Stream& stream) { return late::stream_of(stream.device_index(), stream.id()); }

c10::Stream as_torch(DeviceIndex index, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(kLate, index), id);
}

void raise_error() {
  const std::string error = late::take_error();
  TORCH_CHECK(error.empty(), "a kernel failed after it had been queued: ", error);
}

void wait_for(late::Stream* stream, const std::string& reason) {
  late::wait_on_host({late::last_of(stream)}, reason);
  raise_error();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLate; }
  Device exchangeDevice(Device device) const override { return Device(kLate, exchange_device(device.index())); }
  Device getDevice() const override { return Device(kLate, current_device); }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return late::kDevices; }

  c10::Stream getStream(Device device) const override {
    return as_torch(definite(device), current_streams[definite(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override { return as_torch(definite(device), 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return as_torch(definite(device), late::next_stream(definite(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const DeviceIndex index = stream.device_index();
    return as_torch(index, std::exchange(current_streams[index], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { return stream_at(stream); }  // not in torch 2.11
  bool queryStream(const c10::Stream& stream) const override { return late::query(late::last_of(stream_at(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream_at(stream), "stream"); }
  void synchronizeDevice(const DeviceIndex index) const override {
    late::wait_for_device(index < 0 ? current_device : index, "device");
    raise_error();
  }

  static late::Event& event_of(void* event) { return *static_cast<late::Event*>(event); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<late::Event*>(event); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new late::Event;
    late::record(event_of(*event), stream_at(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) late::wait_in_stream(stream_at(stream), event_of(event).point);
  }
  bool queryEvent(void* event) const override { return event == nullptr || late::query(event_of(event).point); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    late::wait_on_host({event_of(event).point}, "event");
    raise_error();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr && *event_of(first).time_us >= 0 &&
                *event_of(second).time_us >= 0, "both events must have been recorded and have passed");
    return (*event_of(second).time_us - *event_of(first).time_us) / 1000;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) late::use_in_stream(data.get_context(), stream_at(stream));
  }
};

// -- memory -----------------------------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(kLate, current_device);
    if (bytes == 0) return {nullptr, device};
    void* address = late::allocate(current_device, bytes, current_stream(current_device));
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "late: out of memory: ", bytes, " bytes are asked for, ",
                     late::allocated(current_device), " are allocated");
    return {address, address, &late::release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &late::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    late::enqueue(current_stream(current_device), [to = late::shadow_of(to), from = late::shadow_of(from), bytes] {
      std::memcpy(to, from, bytes);
    });
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = late::allocate_pinned(bytes);
    return {address, address, &late::release_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &late::release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator& device_allocator() {
  static auto* made = new DeviceAllocator;
  return *made;
}

struct OnDevice {
  explicit OnDevice(DeviceIndex index) : before(exchange_device(index)) {}
  ~OnDevice() { current_device = before; }
  DeviceIndex before;
};

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const OnDevice on(storage->device().index());
  c10::DataPtr data = device_allocator().allocate(bytes);
  if (const size_t kept = std::min(bytes, storage->nbytes()); kept > 0) {
    device_allocator().copy_data(data.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// -- random numbers ---------------------------------------------------------------------------------------------------

// A seed and a count, as CUDA's: each operation that draws takes a number when it is queued, whenever it runs.
struct Generator final : c10::GeneratorImpl {
  static c10::DeviceType device_type() { return kLate; }
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kLate, index), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t value) override { seed_ = value, count_ = 0; }
  void set_offset(uint64_t value) override { count_ = value; }
  uint64_t get_offset() const override { return count_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &count_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.is_contiguous() && state.numel() * state.itemsize() == 16,
                "a state of this device has 16 bytes in the host's memory");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&count_, static_cast<const char*>(state.data()) + 8, 8);
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_, made->count_ = count_;
    return made;
  }
  at::Generator next() {
    return at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u * ++count_);
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t count_ = 0;
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto* made = new std::vector<at::Generator>{at::make_generator<Generator>(DeviceIndex{0}),
                                                     at::make_generator<Generator>(DeviceIndex{1})};
  return made->at(static_cast<size_t>(index < 0 ? current_device : index));
}

bool gives_default = false;  // torch.Generator(device) returns the default one: Python has no other way to it

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return late::kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchange_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return gives_default ? default_generator(index)
                         : at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  Device getDeviceFromPtr(void* data) const override {
    return Device(kLate, static_cast<DeviceIndex>(late::device_at(data)));
  }
  bool isPinnedPtr(const void* data) const override { return late::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* made = new PinnedAllocator;
    return made;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

// -- tensors over the same sizes --------------------------------------------------------------------------------------

// Tensors of another kind in place of a call's device tensors: what shares memory there shares it here.
class Doubles {
 public:
  explicit Doubles(DispatchKey key) : key_(key) {}

  at::Tensor of(const at::Tensor& tensor) {
    auto& made = tensors_[tensor.unsafeGetTensorImpl()];
    if (!made.defined()) {
      made = at::detail::make_tensor<c10::TensorImpl>(storage_of(tensor), DispatchKeySet(key_), tensor.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
    return made;
  }

 private:
  c10::Storage storage_of(const at::Tensor& tensor) {
    auto* real = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(real);
    if (found == storages_.end()) {
      const bool meta = key_ == DispatchKey::Meta;
      c10::DataPtr data(meta ? nullptr : late::shadow_of(real->data()),
                        Device(meta ? c10::DeviceType::Meta : c10::DeviceType::CPU));
      found = storages_.emplace(real, c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), real->nbytes(), std::move(data),
          meta ? c10::GetAllocator(c10::DeviceType::Meta) : nullptr, meta)).first;
    }
    return found->second;
  }

  DispatchKey key_;
  std::map<c10::StorageImpl*, c10::Storage> storages_;
  std::map<c10::TensorImpl*, at::Tensor> tensors_;
};

bool is_late(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLate; }

at::Tensor shadow_of(const at::Tensor& tensor) { return Doubles(DispatchKey::CPU).of(tensor); }

// The argument with a function of each of its tensors in their place.
template <class Function>
IValue replaced(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(function(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each ? std::optional<at::Tensor>(function(*each)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <class Function>
void for_each_tensor(const std::vector<IValue>& values, Function function) {
  for (const IValue& value : values) {
    replaced(value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) function(tensor);
      return tensor;
    });
  }
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const OnDevice on(device ? definite(*device) : current_device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice on(device ? definite(*device) : current_device);
  return at::detail::empty_generic(size, &device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

void reshape(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, tensor.dtype().itemsize(),
                                                        static_cast<size_t>(tensor.storage_offset()));
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_storage(storage, bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  at::Tensor shaped = at::detail::empty_meta(size, self.scalar_type(), format);
  if (self.sizes() != size || format) reshape(self, size, shaped.strides());
  return self;
}

// -- copies -----------------------------------------------------------------------------------------------------------

bool are_alike(const at::Tensor& first, const at::Tensor& second) {
  return first.dtype() == second.dtype() && first.sizes() == second.sizes() &&
         ((first.is_contiguous() && second.is_contiguous()) ||
          (first.strides() == second.strides() && first.is_non_overlapping_and_dense()));
}

void queue_copy(late::Stream* stream, at::Tensor to, at::Tensor from) {
  late::enqueue(stream, [to, from]() mutable {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
}

void let_wait(late::Stream* waiting, late::Stream* stream) {
  if (waiting != stream) late::wait_in_stream(waiting, late::last_of(stream));
}

// Between pinned memory and the device: whoever changes the one too early, or reads the other, is wrong.
void queue_pinned_copy(late::Stream* stream, void* to, const void* from, size_t bytes, const void* pinned) {
  late::use_pinned(pinned, late::enqueue(stream, [to, from, bytes] { std::memcpy(to, from, bytes); }));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  late::Stream* stream = current_stream(is_late(from) ? from.device().index() : to.device().index());
  if (is_late(from) && is_late(to)) {
    late::Stream* receiving = current_stream(to.device().index());
    let_wait(stream, receiving);
    queue_copy(stream, shadow_of(to), shadow_of(from));
    let_wait(receiving, stream);
  } else if (is_late(to)) {
    if (non_blocking && are_alike(from, to) && late::is_pinned(from.const_data_ptr())) {
      queue_pinned_copy(stream, shadow_of(to).mutable_data_ptr(), from.const_data_ptr(), from.nbytes(),
                        from.const_data_ptr());
    } else {
      // From memory that is not pinned, CUDA says, the driver may wait for the stream and then stage the copy. It is as
      // late here as it may be, and counted.
      queue_copy(stream, shadow_of(to), from.clone());
      if (!non_blocking) {
        wait_for(stream, "copy to device");
      } else if (!late::is_pinned(from.const_data_ptr())) {
        late::wait_on_host({}, "copy from pageable memory");
      }
    }
  } else if (non_blocking && are_alike(from, to) && late::is_pinned(to.const_data_ptr())) {
    queue_pinned_copy(stream, to.mutable_data_ptr(), shadow_of(from).const_data_ptr(), to.nbytes(), to.const_data_ptr());
  } else {
    wait_for(stream, "copy to host");
    at::Tensor written = to;
    written.copy_(shadow_of(from));
  }
  return to;
}

at::Scalar item(const at::Tensor& self) {
  wait_for(current_stream(self.device().index()), "item");
  return shadow_of(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// -- all other operations ---------------------------------------------------------------------------------------------

// One operation that is asked for.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)), index_(current_device) {
    std::optional<DeviceIndex> found;
    for_each_tensor(arguments_, [&](const at::Tensor& tensor) {
      if (!is_late(tensor)) {
        TORCH_CHECK(tensor.device().is_cpu() && (tensor.dim() == 0 || takes_indices()), schema_.name(),
                    ": expected all tensors to be on the same device, but one is on ", tensor.device());
        return;
      }
      TORCH_CHECK(!found || *found == tensor.device().index(), schema_.name(),
                  ": expected all tensors to be on the same device, but one is on ", tensor.device());
      found = tensor.device().index();
    });
    has_tensors_ = found.has_value();
    if (found) index_ = *found;
    for (const IValue& value : arguments_) {
      if (!found && value.isDevice()) index_ = definite(value.toDevice());
    }
  }

  Stack results() {
    const OnDevice on(index_);
    return has_tensors_ && has_known_shapes() ? queued() : waited_for();
  }

 private:
  bool takes_indices() const {
    for (const IValue& value : arguments_) {
      if (value.isOptionalTensorList()) return true;
    }
    return false;
  }

  // Of indices, masks alone have to be read.
  bool depends_on_data() const {
    for (const IValue& value : arguments_) {
      if (!value.isOptionalTensorList()) continue;
      const auto indices = value.toOptionalTensorVector();
      return std::any_of(indices.begin(), indices.end(), [](const std::optional<at::Tensor>& index) {
        return index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
      });
    }
    return op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
  }

  bool has_known_shapes() const {
    if (depends_on_data()) return false;
    for (const auto& returned : schema_.returns()) {
      const auto kind = returned.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
    }
    return has_meta_kernel() || schema_.name().ends_with('_');  // in place
  }

  bool has_meta_kernel() const { return op_.hasComputedKernelForDispatchKey(DispatchKey::Meta); }

  // Whose memory this result is, where it is an argument that the operation changed.
  const IValue* changed(const c10::Argument& returned) const {
    if (returned.alias_info() == nullptr) return nullptr;
    TORCH_CHECK(returned.alias_info()->isWrite(), schema_.name(), " returns a view, which late does not know");
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* info = schema_.arguments()[i].alias_info();
      if (info != nullptr && info->isWrite() && info->beforeSets() == returned.alias_info()->beforeSets()) {
        return &arguments_[i];
      }
    }
    TORCH_CHECK(false, schema_.name(), " returns none of its arguments");
  }

  // Of a layer norm they have the type of the input if the weights have it; on GPUs, and so in the meta kernel, always
  // float. A batch norm that does not train has none.
  void keep_statistics_as_processors_do(Stack& shapes) const {
    if (schema_.name() == "aten::native_batch_norm") {
      for (size_t i : {1, 2}) {
        if (!arguments_[5].toBool()) shapes[i] = at::detail::empty_meta({0}, shapes[i].toTensor().scalar_type());
      }
      return;
    }
    const auto type = arguments_[0].toTensor().scalar_type();
    if (arguments_[2].isTensor() && arguments_[2].toTensor().scalar_type() != type) return;
    for (size_t i : {1, 2}) {
      const at::Tensor meta = shapes[i].toTensor();
      shapes[i] = at::Tensor(at::detail::empty_strided_meta(meta.sizes(), meta.strides(), type));
    }
  }

  // What the operation would return, as meta tensors; the arguments that it resizes are resized.
  Stack shapes() {
    Doubles metas(DispatchKey::Meta);
    Stack stack;
    for (const IValue& value : arguments_) {
      stack.push_back(value.isGenerator() ? IValue() : value.isDevice() ? IValue(Device(c10::DeviceType::Meta))
          : replaced(value, [&](const at::Tensor& tensor) { return is_late(tensor) || (tensor.defined() &&
                tensor.dim() > 0) ? metas.of(tensor) : tensor; }));
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&stack);
    }
    if (schema_.name().ends_with("native_layer_norm") || schema_.name().ends_with("native_batch_norm")) {
      keep_statistics_as_processors_do(stack);
    }
    for_each_tensor(arguments_, [&](const at::Tensor& tensor) {
      if (!is_late(tensor)) return;
      const at::Tensor meta = metas.of(tensor);
      if (meta.sizes() != tensor.sizes()) reshape(tensor, meta.sizes(), meta.strides());
    });
    return stack;
  }

  Stack queued() {
    const Stack shapes = has_meta_kernel() ? this->shapes() : Stack(schema_.returns().size());
    Stack results;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const IValue* argument = changed(schema_.returns()[i]);
      results.push_back(argument != nullptr ? *argument : replaced(shapes[i], [&](const at::Tensor& meta) {
        return !meta.defined() ? meta : empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), {},
                                                      Device(kLate, index_), {});
      }));
    }
    late::enqueue(current_stream(index_), kernel(results));
    return results;
  }

  // For shapes that depend on data, as CUDA does it; and for operations without a meta kernel, which a GPU would queue.
  Stack waited_for() {
    if (has_tensors_) {
      wait_for(current_stream(index_), (depends_on_data() ? "shape of " : "fallback of ") + schema_.name());
    }
    Stack computed = shadows();
    const Stack kept = computed;  // see kernel()
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&computed);
    }
    Stack results;
    for (size_t i = 0; i < computed.size(); ++i) {
      const IValue* argument = changed(schema_.returns()[i]);
      results.push_back(argument != nullptr ? *argument : replaced(computed[i], [&](const at::Tensor& host) {
        if (!host.defined()) return host;
        at::Tensor made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, Device(kLate, index_), {});
        queue_copy(current_stream(index_), shadow_of(made), host);
        return made;
      }));
    }
    return results;
  }

  // The arguments for the processor's kernel; what lies in the host's memory is read now.
  Stack shadows() {
    Doubles doubles(DispatchKey::CPU);
    Stack stack;
    bool draws = false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].name() == "generator") {
        at::Generator generator = arguments_[i].isNone() ? default_generator(index_) : arguments_[i].toGenerator();
        const std::lock_guard<std::mutex> guard(generator.mutex());
        stack.push_back(at::check_generator<Generator>(generator)->next());
        draws = true;
      } else if (arguments_[i].isDevice()) {
        stack.push_back(Device(c10::DeviceType::CPU));
      } else {
        stack.push_back(replaced(arguments_[i], [&](const at::Tensor& tensor) {
          if (!tensor.defined()) return tensor;
          if (is_late(tensor)) return doubles.of(tensor);
          at::Tensor read = tensor.clone();
          if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) read.unsafeGetTensorImpl()->set_wrapped_number(true);
          return read;
        }));
      }
    }
    TORCH_CHECK(draws || !op_.hasTag(at::Tag::nondeterministic_seeded), schema_.name(),
                " draws random numbers, but takes no generator");
    return stack;
  }

  std::function<void()> kernel(const Stack& results) {
    Stack outputs;  // to be filled
    for (size_t i = 0; i < results.size(); ++i) {
      outputs.push_back(changed(schema_.returns()[i]) != nullptr ? IValue()
          : replaced(results[i], [](const at::Tensor& made) { return made.defined() ? shadow_of(made) : made; }));
    }
    return [op = op_, stack = shadows(), outputs]() mutable {
      const at::AutoDispatchBelowADInplaceOrView below;
      const Stack kept = stack;  // torch 2.11 drops two arguments that a kernel returns by reference before it copies them
      op.callBoxed(&stack);
      for (size_t i = 0; i < outputs.size(); ++i) {
        std::vector<at::Tensor> computed;
        for_each_tensor({stack[i]}, [&](const at::Tensor& tensor) { computed.push_back(tensor); });
        size_t next = 0;
        for_each_tensor({outputs[i]}, [&](at::Tensor output) {
          const at::Tensor& result = computed.at(next++);
          TORCH_CHECK(result.sizes() == output.sizes() && result.dtype() == output.dtype(), op.schema().name(),
                      ": the meta kernel foresaw ", output.toString(), output.sizes(), ", the processor's returned ",
                      result.toString(), result.sizes());
          output.copy_(result);
        });
      }
    };
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  std::vector<IValue> arguments_;
  DeviceIndex index_;
  bool has_tensors_ = false;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  for (IValue& result : Call(op, std::move(arguments)).results()) stack->push_back(std::move(result));
}

// The processor's kernel has no argument for a generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::Tensor mask = empty(input.sizes(), at::kBool, {}, input.device(), {}, {});
  if (train && !*train) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &item);
  library.impl("record_stream", &record_stream);
  library.impl("native_dropout", &native_dropout);
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward", "index.Tensor"}) {  // torch has parts, too
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

c10::impl::DeviceGuardImplRegistrar guard_registrar(kLate, new Guard);

}  // namespace

// -- for Python -------------------------------------------------------------------------------------------------------

extern "C" {

void late_start() {
  c10::SetAllocator(kLate, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
void late_configure(uint64_t seed, double patience_ms, bool synchronous) {
  late::configure({seed, patience_ms, synchronous});
}
void late_busy(double duration_us) { late::enqueue(current_stream(current_device), nullptr, duration_us); }
size_t late_host_waits(char* text, size_t size) {
  const std::string lines = late::host_waits();
  if (lines.size() < size) std::memcpy(text, lines.c_str(), lines.size() + 1);
  return lines.size();
}
// Transfers between processes: the streams' numbers are those behind the pool.
void late_copy(int device, int64_t stream, void* to, const void* from, size_t bytes) {  // from nowhere: poison
  auto in_host = [](const void* address) {
    char* shadow = late::shadow_of(address);
    return shadow != nullptr ? shadow : static_cast<char*>(const_cast<void*>(address));
  };
  late::enqueue(late::stream_of(device, stream), [to = in_host(to), from = in_host(from), bytes] {
    if (from == nullptr) {
      std::memset(to, 0xFF, bytes);
    } else {
      std::memcpy(to, from, bytes);
    }
  });
}
void late_gate(int device, int64_t stream) { late::gate(late::stream_of(device, stream)); }
void late_open(int device, int64_t stream) { late::open(late::stream_of(device, stream)); }
uint64_t late_queued(int device, int64_t stream) { return late::last_of(late::stream_of(device, stream)).number; }
void late_wait_quietly(int device, int64_t stream, uint64_t number) {
  late::wait_quietly({late::stream_of(device, stream), number});
}
void late_give_default_generators(bool value) { gives_default = value; }
uint64_t late_allocated(int device) { return late::allocated(device); }
uint64_t late_peak(int device) { return late::peak(device); }
void late_reset_peak(int device) { late::reset_peak(device); }

}  // extern "C"
