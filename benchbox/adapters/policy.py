"""The policy around a module that was not written for benchbox."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, apply_activation_checkpointing

from benchbox.adapters.batches import GeneratedSamples, flatten_generated, unflatten
from benchbox.adapters.casting import cast_inputs_to_weights, inexact_buffers, keep_buffers
from benchbox.adapters.kernels import set_attention
from benchbox.adapters.roles import conventional_roles
from benchbox.adapters.signatures import takes
from benchbox.adapters.units import find_layer_units, outermost_layers, resolve_layer_units
from benchbox.adapters.unused import unused_parameters
from benchbox.adapters.weights import load_by_name
from benchbox.data.normalisation import Normaliser
from benchbox.errors import ConfigurationError, DataError, Problem, UnsupportedError
from benchbox.observer.introspect.names import live_parameters
from benchbox.registry.contracts import Losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch.utils._pytree import TreeSpec

    from benchbox.adapters.units import UnitNames
    from benchbox.registry.contracts import Axes, Batch, BatchSpec, Role
    from benchbox.registry.weights import LoadedWeights
    from benchbox.theory.flops import Product


class AdaptedPolicy(nn.Module):
    """A `Policy` that calls a module and maps its output to a loss. See `benchbox.adapt` for the arguments.

    Reports name parameters and buffers as the module does, without the parts `module` and `_checkpoint_wrapped_module`
    (`benchbox.observer.introspect.names`), and so does the state dict.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        loss: Callable[..., Tensor],
        batch: Callable[..., Any],
        spec: BatchSpec | None,
        units: UnitNames | None,
        roles: Callable[[str], Role] | None,
        attention: Callable[[nn.Module, str], None] | None,
        act: Callable[[nn.Module, Batch], Tensor] | None,
        work: Callable[[Batch], list[Product]] | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.checkpointing = False
        self.unused_parameters: tuple[str, ...] = ()  # by `freeze_unused_parameters`
        self._loss, self._loss_reads_batch = loss, takes(loss, 2)
        self._batch, self._spec, self._roles, self._attention, self._act = batch, spec, roles, attention, act
        self._units = find_layer_units(module) if units is None else resolve_layer_units(module, units)
        self._structure: TreeSpec | None = None  # of generated arguments
        if spec is not None:
            self.state_normaliser = Normaliser(spec.state_dim, spec.state_normalisation)
            self.action_normaliser = Normaliser(spec.action_dim, spec.action_normalisation)
        if work is not None:
            self.work = cast("Any", work)  # absent without a formula, as the contract allows
        cast_inputs_to_weights(module)

    def apply_axes(self, axes: Axes) -> None:
        """Switch attention and checkpointing as a cell says. Called once, after the policy is built.

        Raises:
            UnsupportedError: the module cannot switch its attention kernel, or no layers to checkpoint were found.
        """
        set_attention(self.module, axes.attention, self._attention)
        self.checkpointing = axes.checkpointing
        if not axes.checkpointing:
            return
        if not self._units:
            raise UnsupportedError(
                f"no layers of {type(self.module).__name__} repeat, so that none can be checkpointed; name them by "
                "benchbox.adapt(units=...)"
            )
        layers = set(outermost_layers(self.module, self._units))
        apply_activation_checkpointing(self.module, check_fn=layers.__contains__)

    def freeze_unused_parameters(self) -> str | None:
        """Freeze the parameters that the loss does not depend on, as a trial step shows; return why it could not, if so.

        DDP waits for the gradient of every trainable parameter. Their names are in `unused_parameters`.
        """
        try:
            unused = unused_parameters(self)
        except Exception as error:  # noqa: BLE001 (the module may raise anything)
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for name, parameter in live_parameters(self):
            if name in unused:
                parameter.requires_grad_(False)
        self.unused_parameters = tuple(sorted(unused))
        return None

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        if act:
            return self.select_actions(batch)
        inputs, arguments = self._arguments(batch)
        args, kwargs = _call(arguments)
        output = self.module(*args, **kwargs)
        loss = (self._loss(output, inputs) if self._loss_reads_batch else self._loss(output)).float()
        if loss.ndim > 1:
            message = f"returned a tensor of shape {tuple(loss.shape)}"
            raise ConfigurationError(Problem("adapt(loss=...)", message, "return a scalar, or one value per sample (B,)"))
        total = loss.mean()
        samples = {"loss": (loss.detach(), torch.ones_like(loss))} if per_sample and loss.ndim else None  # a scalar has none
        return Losses(total, {"loss": total.detach()}, samples)

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return (CheckpointWrapper,) if self.checkpointing else self._units

    def batch_spec(self) -> BatchSpec:
        """Return what the data must deliver.

        Raises:
            UnsupportedError: the policy generates its batches, and reads no dataset.
        """
        if self._spec is None:
            raise UnsupportedError(f"{type(self.module).__name__} generates its batches: write data: synthetic")
        return self._spec

    def own_samples(self, seed: int) -> GeneratedSamples | None:
        """Return the source of generated samples; None if the policy reads benchbox's batch."""
        return GeneratedSamples(self._batch, seed) if self._spec is None else None

    def parameter_roles(self) -> Mapping[str, Role]:
        if self._roles is None:
            return conventional_roles(self.module)
        return {name: self._roles(name) for name, _ in live_parameters(self.module)}

    @torch.no_grad()
    def select_actions(self, batch: Batch) -> Tensor:
        """See `benchbox.registry.contracts.Policy`: actions by `adapt(act=...)`, in raw units."""
        if self._act is None or self._spec is None:
            raise UnsupportedError(f"{type(self.module).__name__} was adapted without act=..., and does not act")
        action = self._act(self.module, self._normalise(batch))
        return self.action_normaliser.denormalise(action, batch["dataset_index"])

    def load_weights(self, path: Path) -> LoadedWeights:
        return load_by_name(self.module, path)

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        if self._spec is None:
            return
        features = {"observation.state": self.state_normaliser, "action": self.action_normaliser}
        for feature, normaliser in features.items():
            missing = [number for number, dataset in enumerate(statistics) if feature not in dataset]
            if missing:
                raise DataError(f"dataset {missing[0]} has no statistics of {feature}")
            normaliser.load([dataset[feature] for dataset in statistics])

    def _arguments(self, batch: Batch) -> tuple[Any, Any]:
        """Return the batch as `loss` reads it, and the arguments of the module."""
        if self._spec is None:
            if self._structure is None:
                _, self._structure = flatten_generated(self._batch, 0)
            arguments = unflatten(batch, self._structure)
            return arguments, arguments
        batch = self._normalise(batch)
        return batch, self._batch(batch)

    def _normalise(self, batch: Batch) -> Batch:
        normalised = dict(batch)
        for key, normaliser in (("state", self.state_normaliser), ("action", self.action_normaliser)):
            if key in batch:
                normalised[key] = normaliser.normalise(batch[key], batch["dataset_index"])
        return normalised

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply as `nn.Module` does, but leave buffers in their dtype: see docs/extending/policy.md."""
        buffers = inexact_buffers(self)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Casting complex values to real")  # undone below
            super()._apply(fn, recurse)
        keep_buffers(buffers)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module. Statistics are read from the dataset, and are not part of it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def _call(arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: a tuple is the former, a dictionary the latter, else the only argument."""
    if isinstance(arguments, tuple):
        return arguments, {}
    return ((), arguments) if isinstance(arguments, dict) else ((arguments,), {})
