// Autocast on the device of backend.cpp: torch's own lists of operations, as CUDA has them.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kLate = c10::DeviceType::PrivateUse1;

bool is_cast(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLate && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

// The last `count` values of the stack with a function of each tensor in its place.
template <class Function>
void replace(Stack* stack, size_t count, Function function) {
  for (auto value = stack->end() - static_cast<std::ptrdiff_t>(count); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = function(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value->toTensorVector()) list.push_back(function(each));
      *value = list;
    }
  }
}

void cast(const c10::OperatorHandle& op, Stack* stack, at::ScalarType type) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  replace(stack, op.schema().arguments().size(), [type](const Tensor& tensor) {
    return is_cast(tensor) ? at::autocast::cached_cast(type, tensor, kLate) : tensor;
  });
  op.callBoxed(stack);
}

void lower(const c10::OperatorHandle& op, Stack* stack) { cast(op, stack, at::autocast::get_autocast_dtype(kLate)); }
void single(const c10::OperatorHandle& op, Stack* stack) { cast(op, stack, at::kFloat); }

void promote(const c10::OperatorHandle& op, Stack* stack) {
  at::ScalarType widest = at::autocast::get_autocast_dtype(kLate);
  replace(stack, op.schema().arguments().size(), [&](const Tensor& tensor) {
    if (is_cast(tensor) && tensor.scalar_type() == at::kFloat) widest = at::kFloat;
    return tensor;
  });
  cast(op, stack, widest);
}

// With fp32 as the type of the result, where none is asked for.
void single_result(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[first + i];
    if (arguments[i].name() == "dtype" && value.isNone() && is_cast((*stack)[first].toTensor())) {
      value = static_cast<int64_t>(at::kFloat);
    }
  }
  op.callBoxed(stack);
}

template <void (*kernel)(const c10::OperatorHandle&, Stack*)>
void register_all(torch::Library& library, std::initializer_list<const char*> names) {
  for (std::string name : names) {
    name.resize(name.find_last_not_of('.') + 1);
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

#define NAME_OF(OP, OVERLOAD, ...) #OP "." #OVERLOAD,
#define NAME(...) NAME_OF(__VA_ARGS__, , )

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  register_all<&lower>(library, {AT_FORALL_LOWER_PRECISION_FP(NAME)});
  register_all<&single>(library, {AT_FORALL_FP32(NAME) "norm.Scalar", "norm.ScalarOpt_dim"});
  register_all<&single_result>(library, {AT_FORALL_FP32_SET_OPT_DTYPE(NAME)});
  register_all<&promote>(library, {AT_FORALL_PROMOTE(NAME) "stack", "cat"});
}

}  // namespace
