"""Give what vpipe uses of torch that has no public name: the one file to read when another torch comes out.

tests/test_torch_private.py names the versions of torch that have these names. It lists the private attributes of
torch's objects, too, such as ``tensor._version``, which are read where they are needed.
"""

from __future__ import annotations

import torch
from torch.autograd import graph
from torch.distributed import distributed_c10d
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _python_dispatch, _pytree

# Many tensors by one kernel, or by few.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_sub = torch._foreach_sub
foreach_sub_ = torch._foreach_sub_

# Nested tuples, lists and dicts of tensors.
tree_leaves = _pytree.tree_leaves
tree_map_only = _pytree.tree_map_only

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base of the context managers that see every operation."""

TorchFunctionDisabled = torch._C.DisableTorchFunctionSubclass
"""Context manager in which ``__torch_function__`` of a subclass is not called: its own function may compute."""

run_backward = graph._engine_run_backward
"""Run autograd's engine: ``torch.autograd.backward`` without its checks, and with edges of the graph as inputs."""

current_backward = torch._C._current_graph_task_id
"""Return the number of the backward that runs in this thread, -1 for none."""

is_reached = torch._C._will_engine_execute_node
"""Return whether the backward that runs comes to a node."""

hooks_for_saved = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the hooks for saved tensors in force; given True, also where they were set under a tracer."""

innermost_transform = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transformation of functions, such as ``torch.vmap``, that is under way; None for none."""

hooks_before_steps, hooks_after_steps = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
"""Hooks that every optimizer calls around its steps."""

world = distributed_c10d._world
"""The process groups of this process, as keys of its ``pg_map``."""

default_store = distributed_c10d._get_default_store
"""Return the store over which the ranks of the default process group have met."""

flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The operation that computes attention on a processor; no counter of operations knows it."""
