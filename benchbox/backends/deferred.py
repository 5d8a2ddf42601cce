"""Deferred initialisation: a policy is built on the meta device, and its weights are computed while a backend shards it.

Operations on meta tensors are recorded while the policy is built and its published weights and statistics are loaded. Replayed
on a rank's device from the same seed, in the same order, they draw the numbers that direct construction would have drawn there,
so the weights are equal bit for bit. Tensors are handed out one by one, each as soon as it has its final value, and are freed
afterwards: a rank that keeps only shards never holds the whole policy.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode

from benchbox.backends.replay import RecordedOperation, Replay, TensorView, map_leaves, storages_of
from benchbox.errors import UnsupportedError
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.observer.introspect.names import live_buffers, live_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

META = torch.device("meta")
# Functions of torch.nn.init that do nothing to meta tensors. `trunc_normal_` calls the first.
_SKIPPED_ON_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")
# Operations that do nothing to meta tensors either, but take 0.5 ms, in Python.
_SLOW_ON_META = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


TRANSFORMERS = "transformers.modeling_utils"
_DEVICE_IN_TRANSFORMERS = "get_torch_context_manager_or_global_device"

# By policy, so that a policy passes through data, freezing and backends as any module.
_DEFERRED: WeakKeyDictionary[nn.Module, DeferredWeights] = WeakKeyDictionary()


class DeferredWeights:
    """Recorded initialisation of a policy on the meta device.

    Args:
        seed: of the random generator, set before the first operation is replayed.
        device: of the rank, on which the operations are replayed.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._seed = seed
        self._operations: list[RecordedOperation] = []
        # All storages are kept alive, because a new one could get the address of one that was freed.
        self._storages: list[UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # by address
        self._created: set[int] = set()  # storages that a recorded operation created

    def renewed(self) -> DeferredWeights:
        """Return an empty recording of the same seed and device."""
        return DeferredWeights(self._seed, self.device)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations on meta tensors inside the with block."""
        originals = {name: getattr(nn.init, name) for name in _SKIPPED_ON_META}
        for name, initialiser in originals.items():
            setattr(nn.init, name, partial(self._record_initialiser, initialiser))
        try:
            with _ConstantsByOperation(), _initialising_transformers(), _MetaDispatchMode(self):
                yield
        finally:
            for name, initialiser in originals.items():
                setattr(nn.init, name, initialiser)

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation that creates or writes a meta tensor. Any other has run already, or makes a view."""
        args, kwargs, result = (map_leaves(self._abstract, structure) for structure in (args, kwargs, result))
        inputs, outputs = storages_of((args, kwargs)), storages_of(result)
        created = outputs - inputs
        if created or (inputs and operation._schema.is_mutable):  # noqa: SLF001 (torch has no public name for it)
            self._created |= created
            draws = torch.Tag.nondeterministic_seeded in operation.tags
            self._operations.append(RecordedOperation(operation, args, kwargs, result, frozenset(inputs | outputs), draws))

    def _record_initialiser(self, initialiser: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record a function of `torch.nn.init` as one operation."""
        if tensor.device.type != "meta":
            return initialiser(tensor, *args, **kwargs)
        view = self._abstract(tensor.detach())
        self._operations.append(
            RecordedOperation(initialiser, (view, *args), kwargs, view, frozenset({view.storage}), draws=True)
        )
        return tensor

    def _abstract(self, leaf: Any) -> Any:
        """Return a view in place of a meta tensor, the rank's device in place of the meta device, and anything else itself."""
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return self.device
        if not isinstance(leaf, Tensor) or leaf.device.type != "meta":
            return leaf
        storage = leaf.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._storages))  # noqa: SLF001 (the storage's address)
        if number == len(self._storages):
            self._storages.append(storage)
        return TensorView(number, leaf.dtype, tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()))

    def bind(self, policy: nn.Module) -> None:
        """Note which recorded tensors are the parameters and buffers of a policy, so that `deferred_weights` returns this.

        Raises:
            UnsupportedError: the values of one are not computed by operations that can be recorded.
        """
        self._targets: dict[str, Any] = {name: self._abstract(tensor.detach()) for name, tensor in _named_tensors(policy)}
        for name, target in self._targets.items():
            if isinstance(target, TensorView) and target.storage not in self._created:
                raise UnsupportedError(
                    f"{type(policy).__name__} cannot be built on the meta device: {name} is not the result of operations on "
                    "tensors of torch's default device; create it by a function of torch, and fill it in place"
                )
        _DEFERRED[policy] = self

    def materialise(self, write: Callable[[str, Tensor], None]) -> None:
        """Compute the parameters and buffers, in the order in which construction finishes them.

        Args:
            write: called with the name of each before wrapping, and the whole tensor on the rank's device in the dtype in which
                it was built. The tensor is freed when it returns, unless it keeps it.
        """
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, target in self._targets.items():
            if isinstance(target, TensorView):
                names[target.storage].append(name)
            else:
                write(name, target.to(self.device))

        def write_storage(number: int, storage: UntypedStorage) -> None:
            for name in names[number]:
                write(name, self._targets[name].of(storage))

        torch.manual_seed(self._seed)
        Replay(self._needed_operations(set(names))).run(write_storage)

    def _needed_operations(self, storages: set[int]) -> list[RecordedOperation]:
        """Return the operations that contribute to the contents of storages, or draw random numbers."""
        needed = []
        for operation in reversed(self._operations):
            if operation.draws or operation.storages & storages:
                storages |= operation.storages
                needed.append(operation)
        return needed[::-1]


@contextmanager
def _initialising_transformers() -> Iterator[None]:
    """Let models of transformers compute their initial weights on the meta device too, where 5.0 and later skip it."""
    modeling: Any = sys.modules.get(TRANSFORMERS)
    original = getattr(modeling, _DEVICE_IN_TRANSFORMERS, None)
    if original is not None:
        setattr(modeling, _DEVICE_IN_TRANSFORMERS, lambda: None)
    try:
        yield
    finally:
        if original is not None:
            setattr(modeling, _DEVICE_IN_TRANSFORMERS, original)


class _MetaDispatchMode(OperationDispatchMode):
    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if operation in _SLOW_ON_META and args[0].is_meta else operation(*args, **kwargs)


class _ConstantsByOperation(TorchFunctionMode):
    """Mode in which the values of `torch.tensor` reach the meta device by an operation, which shows them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            if device.type == "meta":
                return func(*args, **(kwargs | {"device": "cpu"})).to(META)
        return func(*args, **kwargs)


def deferred_weights(policy: nn.Module) -> DeferredWeights | None:
    """Return the recorded initialisation of a policy, or None if its weights exist."""
    return _DEFERRED.get(policy)


def take_deferred_weights(policy: nn.Module) -> DeferredWeights | None:
    """Return the recorded initialisation of a policy as `deferred_weights` does, and forget it: the caller materialises it."""
    return _DEFERRED.pop(policy, None)


def materialise_policy(policy: nn.Module) -> None:
    """Give a policy all its weights on the rank's device, without a second copy, unless it has them already.

    Its parameters are new objects.
    """
    weights = take_deferred_weights(policy)
    if weights is None:
        return
    owners: defaultdict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)  # several of a tied tensor
    for module in policy.modules():
        for name, tensor in _own_tensors(module):
            owners[tensor].append((module, name))
    tensors = dict(_named_tensors(policy))

    def replace(name: str, full: Tensor) -> None:
        replacement = _like(tensors[name], full)
        for module, own_name in owners[tensors[name]]:
            setattr(module, own_name, replacement)

    weights.materialise(replace)


def allocate(modules: Iterable[nn.Module], device: torch.device, replacements: dict[Tensor, Tensor]) -> None:
    """Replace the meta parameters and buffers that modules have directly by uninitialised ones on a device.

    Args:
        replacements: of earlier calls, by meta tensor, so that tied tensors stay tied. New ones are added.
    """
    for module in modules:
        for name, tensor in list(_own_tensors(module)):
            if tensor.device.type == "meta":
                if tensor not in replacements:
                    replacements[tensor] = _like(tensor, torch.empty_like(tensor, device=device))
                setattr(module, name, replacements[tensor])


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return values as a parameter, trainable or not, if the tensor is one."""
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that a module has directly, tied ones under each of their names."""
    for tensors in (module._parameters, module._buffers):  # noqa: SLF001 (named_parameters skips tied ones)
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _named_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from live_parameters(policy)
    yield from live_buffers(policy)
