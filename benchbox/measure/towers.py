"""The tower of a policy that runs: by its modules in forward, by the sequence numbers of autograd's nodes in backward."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function

from benchbox.observer.hooks.dispatch import in_backward, is_recomputing
from benchbox.observer.introspect.names import unwrapped_modules
from benchbox.store.rank_profile import UNKNOWN_TOWER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from benchbox.registry.contracts import Role

ANNOTATION = "tower:"


class TowerTracker:
    """Follows the towers while its with block lasts.

    A module whose parameters are all in one tower runs for that tower, and so do the operations between it and the following
    module of the same caller: attention runs for the tower whose projections ran before it. Other operations of a module that
    has parameters of several towers run for none. Where torch.compile has compiled such a module, all of it runs for an unknown
    tower. Backward runs for the tower that made its node. The sequence numbers of nodes increase in the order of forward, so
    that those of a tower are intervals.

    Args:
        model: the wrapped policy.
        roles: of its parameters, by name before wrapping.
        annotate: write the towers into the trace of torch's profiler, as ranges that begin with `ANNOTATION`.
    """

    def __init__(self, model: nn.Module, roles: Mapping[str, Role], *, annotate: bool = False) -> None:
        towers: defaultdict[str, set[str]] = defaultdict(set)  # module -> towers of its parameters
        for name, role in roles.items():
            parts = name.split(".")
            for depth in range(len(parts)):
                towers[".".join(parts[:depth])].add(role.tower)
        # None or unknown where there are several. Modules without parameters are left out: they run for whoever calls them.
        self._tower_by_module: dict[int, str | None] = {
            id(module): next(iter(towers[name])) if len(towers[name]) == 1 else UNKNOWN_TOWER if _is_compiled(module) else None
            for name, module in unwrapped_modules(model)
            if towers.get(name)
        }
        self._annotate = annotate
        self._running: list[int] = []  # ids of modules, innermost last
        self._tower: str | None = None
        self._range: Any = None
        self._sequence_starts: list[int] = []  # sequence number of the first node of each interval, and the tower of it
        self._sequence_towers: list[str | None] = []

    def __enter__(self) -> Self:
        # Checkpointing ends a recomputation early by an exception.
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._switch(None)
        for handle in self._handles:
            handle.remove()

    def current(self) -> str | None:
        """Return the tower for which the running operation runs; None for none."""
        if in_backward() and not (is_recomputing() and self._tower is not None):
            node: Any = torch._C._current_autograd_node()  # noqa: SLF001 (torch has no public function for this)
            return None if node is None else self.tower_of_node(node._sequence_nr())  # noqa: SLF001
        return self._tower

    def tower_of_node(self, sequence: int) -> str | None:
        """Return the tower whose forward made the autograd node with this sequence number."""
        index = bisect_right(self._sequence_starts, sequence) - 1
        return self._sequence_towers[index] if index >= 0 else None

    # Modules inside a compiled graph do not run: torch.compile traces their hooks.

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        key = id(module)
        if key in self._tower_by_module and not torch.compiler.is_compiling():
            self._running.append(key)
            self._switch(UNKNOWN_TOWER if self._is_in_compiled() else self._tower_by_module[key])

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        key = id(module)
        if key not in self._tower_by_module or torch.compiler.is_compiling():
            return
        while self._running and self._running.pop() != key:
            pass
        # A recomputation may end at any module, inside of the node that asked for it: no range may outlast the module.
        if not self._running or self._tower_by_module[key] in (None, UNKNOWN_TOWER) or in_backward():
            self._switch(UNKNOWN_TOWER if self._is_in_compiled() else None)

    def _is_in_compiled(self) -> bool:
        """Return whether a compiled module of several towers runs, or one inside of it that stayed uncompiled."""
        return any(self._tower_by_module[key] == UNKNOWN_TOWER for key in self._running)

    def _switch(self, tower: str | None) -> None:
        if tower == self._tower:
            return
        self._tower = tower
        if not in_backward():  # nodes of a recomputation are never run
            self._sequence_starts.append(torch._C._autograd._get_sequence_nr())  # noqa: SLF001
            self._sequence_towers.append(tower)
        if not self._annotate:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if tower is not None:
            self._range = record_function(f"{ANNOTATION}{tower}")
            self._range.__enter__()


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has made a function of a module's forward, or of the method that does its work."""
    return any(hasattr(value, "_torchdynamo_orig_callable") for value in vars(module).values())
