"""What vpipe uses of torch without a public name is in one file, and is known to be in these versions of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from test_rooms import FILES, LIBRARY, ROOT, nodes, room_of, tier_of

from vpipe import torch_private

VERSIONS = ("2.11", "2.13")
"""Those that have all the names: 2.11 was run on an H200 (docs/devices.md), 2.13 on processors, where every test is."""

PRIVATE = ROOT / "torch_private.py"

VARIABLES = {"_cache", "_cache_enabled", "_current_level", "_is_profiler_enabled"}
"""Of modules; they change, so that they are read there."""

ATTRIBUTES = {
    "_backward_hooks", "_backward_pre_hooks", "_buffers", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks",
    "_is_full_backward_hook", "_modules", "_parameters",  # of modules
    "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks",  # of optimizers
    "_local_tensor", "_spec", "_version",  # of tensors
    "_device_types", "_get_backend", "_schema", "_set_default_timeout"}  # of process groups, operations and backends
"""Of torch's objects; every one is a risk."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(file: Path) -> Iterator[str]:
    """``torch._C``, ``torch.nn.modules.batchnorm._NormBase``: what a file imports, or reads of what it imports."""
    imported = {}
    for node in nodes(file):
        if isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname is not None}
            imported |= {first: first for alias in node.names if (first := alias.name.partition(".")[0])}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from (name for name in imported.values() if name.startswith("torch.") and any(
        map(is_private, name.split("."))))
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in VARIABLES:
            first, *rest = ast.unparse(node).split(".")
            if imported.get(first, "").partition(".")[0] == "torch":
                yield ".".join([imported[first], *rest])


def test_private_names_of_torch_are_in_one_file() -> None:
    library = [file for file in FILES if tier_of(room_of(file)) == LIBRARY and file != PRIVATE]
    found = {file.relative_to(ROOT).as_posix(): names for file in library if (names := sorted(private_names(file)))}
    assert found == {"runtime/compiled.py": ["torch._dynamo.config"]}, "its import takes seconds"
    assert len(set(private_names(PRIVATE))) > 15
    own = {name for file in library for node in nodes(file) for name in (
        [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else
        [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else
        [node.attr] if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else [])}
    read = {node.attr for file in library for node in nodes(file) if isinstance(node, ast.Attribute)
            and is_private(node.attr)}
    assert read - own - VARIABLES <= ATTRIBUTES | {"_asdict", "_replace", "_exit"}, "of torch's objects"


def test_this_torch_is_known_to_have_the_names() -> None:
    version = torch_private.torch.__version__.rpartition(".")[0]  # importing the file has found them
    assert version in VERSIONS, "run the whole suite with this torch, then name its version above"
