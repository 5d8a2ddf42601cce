"""Tensors that a module keeps outside its parameters and buffers."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH = 4  # of lists, dictionaries and objects in an attribute
_OF_TORCH = frozenset(vars(nn.Module()))
_LEAVES = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, str, bytes, int, float, bool, type(None))


def hidden_meta_tensor(policy: nn.Module) -> str | None:
    """Return the name of a meta tensor that is neither a parameter nor a buffer, and will therefore never have values.

    Schedulers of diffusion models keep tables in such tensors, and some modules keep them in plain attributes.
    """
    visited: set[int] = set()
    for prefix, module in policy.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                for path in _meta_tensors(value, f"{prefix}.{name}" if prefix else name, _DEPTH, visited):
                    return path
    return None


def _meta_tensors(value: Any, path: str, depth: int, visited: set[int]) -> Iterator[str]:
    if isinstance(value, Tensor):
        if value.is_meta and not isinstance(value, nn.Parameter):
            yield path
        return
    if depth == 0 or isinstance(value, _LEAVES) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple | set):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        items = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for inner, item in items:
        yield from _meta_tensors(item, inner, depth - 1, visited)
