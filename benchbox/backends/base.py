"""The contract of a backend, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchbox.backends.deferred import materialise_policy
from benchbox.backends.observe import Observed, observe
from benchbox.backends.settings import read_settings
from benchbox.backends.state import TrainingState, create_optimizer_state, named_parameters
from benchbox.errors import UnsupportedError
from benchbox.observer.introspect.names import live_parameters
from benchbox.observer.introspect.tensors import local_shard
from benchbox.observer.introspect.wrappers import optimizer_chain
from benchbox.optim import MasterWeightOptimizer, clip_coefficient, plan_groups, scale_gradients, squared_norm
from benchbox.registry.backends import DEFAULT_SHARD_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch.optim import Optimizer

    from benchbox.dcp.shards import Shards
    from benchbox.optim import GroupPlan, StepSchedule
    from benchbox.registry.contracts import Batch, Policy
    from benchbox.registry.launch_record import Setting
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step that a backend must know before it is built: DeepSpeed and accelerate fix them at construction."""

    batch: int
    accumulation: int
    max_grad_norm: float
    shard_size: int = DEFAULT_SHARD_SIZE  # of a hybrid backend


@dataclass(frozen=True, slots=True)
class Prepared:
    """A policy made ready to step. Nothing in it is ever rebound.

    `model` is the wrapped policy to call, `optimizer` what accelerate returned, `stepping` the optimizer that the schedule is
    built on: its learning rates are in force in a step.
    """

    model: nn.Module
    optimizer: Any
    stepping: Optimizer
    schedule: StepSchedule


class Backend(ABC):
    """Prepares a policy and carries out the parts of a step that depend on who shards and reduces.

    A step is `begin_step`; for each micro-batch, `context` around forward and `backward`; then `clip`, `step` or `skip_step`,
    `zero_grad`. Between steps `stepped_tensors` are the weights in the precision in which they are trained.
    """

    name: ClassVar[str]
    # Phases that this backend cannot time separately, and why; their time is in the phase that the reason names.
    fused_phases: ClassVar[dict[str, str]] = {}
    # Whether `_prepare` takes a policy on the meta device and fills its shards itself, from `take_deferred_weights`. A backend
    # that replicates the parameters gets them all on the rank's device.
    fills_shards: ClassVar[bool] = False
    # Why gradients of parameters that are frozen for some steps are computed and dropped; empty where they are not computed.
    drops_frozen_gradients: ClassVar[str] = ""
    # Whether parameters may be scalars, tensors without a dimension.
    takes_scalars: ClassVar[bool] = True

    def __init__(self) -> None:
        self.enter_stage: Callable[[str], None] = lambda _: None  # to report a long part of `prepare`
        self.prepared: Prepared
        self.device: torch.device
        self.grad_norm: Tensor  # () float32: of the last step, over all ranks, before clipping
        self._recipe: Recipe
        self._shape: StepShape
        self._plans: list[GroupPlan]
        self._frozen: list[nn.Parameter] = []  # parameters that the current step does not train, of those that later steps do

    @staticmethod
    def environment() -> dict[str, str]:
        """Return the environment variables that must be set before accelerate or deepspeed look at them."""
        return {}

    def prepare(self, policy: Policy, recipe: Recipe, optim: OptimSpec, shape: StepShape) -> Prepared:
        """Make groups by name, then shard or wrap, then masters, then optimizer, then the schedule on that optimizer.

        Args:
            policy: built in float32, statistics loaded; or on the meta device, with `deferred_weights`.

        Raises:
            UnsupportedError: the policy has complex parameters, or scalar ones, which this backend does not take.
        """
        assert isinstance(policy, nn.Module)
        self._check_parameters(policy)
        self._recipe, self._shape = recipe, shape
        plans = self._plans = plan_groups(policy, policy.parameter_roles(), optim)
        if not self.fills_shards:
            materialise_policy(policy)
        self.prepared = self._prepare(policy, recipe, optim, plans)
        return self.prepared

    def _check_parameters(self, policy: nn.Module) -> None:
        complex_names = [name for name, parameter in live_parameters(policy) if parameter.is_complex()]
        if complex_names:  # a cast to the dtype of a recipe would drop their imaginary parts
            raise UnsupportedError(f"{', '.join(complex_names)}: complex parameters; train real ones, and view them as complex")
        scalars = [] if self.takes_scalars else [name for name, parameter in live_parameters(policy) if not parameter.ndim]
        if scalars:
            hint = "give them shape (1,), or choose ddp"
            raise UnsupportedError(f"{self.name} cannot shard parameters without a dimension, as {', '.join(scalars)}: {hint}")

    @abstractmethod
    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared: ...

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context of forward and backward of one micro-batch; at `boundary` gradients are reduced over ranks."""
        return nullcontext()

    def compute(self) -> AbstractContextManager[Any]:
        """Return the context of forward: autocast, where the recipe computes in another dtype than it stores."""
        if self._recipe.storage == self._recipe.compute:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self._recipe.compute])

    def backward(self, loss: Tensor, *, boundary: bool) -> None:  # noqa: ARG002
        """Accumulate the gradient of `loss` / accumulation."""
        (loss / self._shape.accumulation).backward()

    def begin_step(self) -> bool:
        """Freeze or thaw the parameter groups that begin frozen, by the number of steps taken; return whether any thaws."""
        step = self.prepared.schedule.step_count
        names = {name for plan in self._plans if step < plan.freeze_steps for name in plan.names}
        thaws = any(plan.freeze_steps == step > 0 for plan in self._plans)  # also in the first step after a resume
        if len(names) == len(self._frozen):
            return thaws
        parameters = dict(live_parameters(self.prepared.model))
        if not self.drops_frozen_gradients:
            for parameter in self._frozen:
                parameter.requires_grad_(True)
            for name in names:
                parameters[name].requires_grad_(False)
        self._frozen = [parameters[name] for name in names]
        return thaws

    @property
    def skips_frozen_work(self) -> bool:
        """True while the backward pass leaves out gradients of parameters that later steps train."""
        return bool(self._frozen) and not self.drops_frozen_gradients

    def rehearse(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Change what the first step of a process changes for the later ones, before a checkpoint is restored.

        All ranks must call it. It may draw random numbers and change buffers, which are restored afterwards.

        Args:
            batches: those of the steps after the resume, which are returned.
        """
        return batches

    def clip(self) -> None:
        """Set `grad_norm`, and scale the gradients so that it is at most `max_grad_norm`. Frozen parameters have no part."""
        for parameter in self._frozen:  # without a gradient no optimizer steps, decays or makes state for a parameter
            parameter.grad = None
        self._clip()

    def _clip(self) -> None:
        gradients = [p.grad for p in self.prepared.model.parameters() if p.grad is not None]
        norm = self._sum_over_shards(squared_norm(gradients, self.device)).sqrt()
        scale_gradients(gradients, clip_coefficient(norm, self._shape.max_grad_norm))
        self.grad_norm = norm

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum over the ranks that share one copy of the gradients. Replicated gradients are complete on every rank."""
        return value

    def norm_of_step(self) -> float:
        """Return the gradient norm of the step that comes next, the same on all ranks; infinite where it is not finite.

        It waits for the device.
        """
        norm = self._norm_before_step().detach().to(torch.float32).reshape(()).clone()
        norm = torch.where(norm.isfinite() & (norm >= 0), norm, torch.inf)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(norm, op=dist.ReduceOp.MAX)  # ranks that judged differently would wait for one another
        return norm.item()

    def _norm_before_step(self) -> Tensor:
        return self.grad_norm

    def step(self) -> None:
        self.prepared.optimizer.step()

    def skip_step(self) -> None:  # noqa: B027 (most backends have nothing to do)
        """Leave weights, masters and moments as they are, in place of `step`."""

    def zero_grad(self) -> None:
        self.prepared.optimizer.zero_grad(set_to_none=True)

    def reshard(self) -> None:  # noqa: B027 (replicated parameters need nothing)
        """Free the parameters that forward passes without a backward have left gathered, where parameters are sharded.

        Gathered parameters would be used again in the next forward, and are not those that the optimizer or a checkpoint reads.
        """

    def stepped_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer steps on this rank, by parameter name before wrapping.

        They are masters or, where the backend steps the parameters, these; of sharded ones the part of this rank, possibly
        empty or flat. After writing into them call `refresh_live`.
        """
        self.reshard()
        names = [name for plan in self._plans for name in plan.names]
        stepping = self.prepared.stepping
        if isinstance(stepping, MasterWeightOptimizer):
            return dict(zip(names, stepping.masters, strict=True))
        parameters = dict(live_parameters(self.prepared.model))
        return {name: local_shard(parameters[name]).detach() for name in names}

    def refresh_live(self) -> None:
        """Make the next forward pass compute with what was written into `stepped_tensors`. All ranks must call it."""
        self.reshard()
        if isinstance(self.prepared.stepping, MasterWeightOptimizer):
            self.prepared.stepping.round_into_live()

    @property
    def max_grad_norm(self) -> float:
        """The norm that gradients are clipped to."""
        return self._shape.max_grad_norm

    def observe(self) -> Observed:
        """Return what runs, read from the live objects and never from the configuration."""
        return replace(observe(self.prepared.model, self.prepared.optimizer, self.device), settings=self.settings())

    def settings(self) -> dict[str, Setting]:
        """Return the settings in force that can tilt a comparison, read from the live objects. A backend may add its own."""
        return read_settings(self.prepared.model, optimizer_chain(self.prepared.optimizer))

    def training_state(self) -> TrainingState:
        """Return what this rank stores of weights, optimizer state and buffers, as views.

        Raises:
            UnsupportedError: this backend cannot be saved.
        """
        raise UnsupportedError(
            f"{self.name} cannot be saved: {type(self).__name__} defines no training_state(); "
            "set checkpoint.every=0 to train without checkpoints"
        )

    def locate_stepped(self, tensors: Mapping[str, Tensor]) -> dict[str, Shards]:
        """Return where tensors belong that have the elements of what this rank steps of each parameter, such as averages."""
        layouts = {part.name: part.layout for part in self.training_state().stepped}
        return {name: layouts[name](tensor) for name, tensor in tensors.items() if name in layouts}

    def create_optimizer_state(self, names: Collection[str]) -> None:
        """Create the optimizer state of the parameters of these names, with any values: a checkpoint overwrites them."""
        create_optimizer_state(self.prepared.stepping, named_parameters(self.prepared.model, names))

    def mesh(self) -> list[int]:
        """Return the sizes of the mesh of ranks; the last is the one that is sharded over, if this backend shards."""
        return [dist.get_world_size() if dist.is_initialized() else 1]

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """Return the mean of a small float32 tensor over all ranks, computed in place."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value
