"""Recording of optimizer steps into the state of an observer."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from .gradients import GradientRecorder
from .introspect.discovery import discover
from .introspect.libraries import calling_libraries
from .introspect.master_matching import match_masters
from .introspect.masters import declared_masters
from .introspect.names import live_parameters, storage_address
from .introspect.tensors import local_shard
from .introspect.wrappers import ends_epoch, optimizer_chain
from .numerics.probes import TensorProbe, can_probe
from .state import ObservedOptimizer, StepObservation, optimizer_state, optimizer_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from .hooks.steps import SteppedTensors
    from .introspect.discovery import TrainingObjects
    from .introspect.masters import MasterLink
    from .state import ObserverState


def _unwatched(method: Callable[..., None]) -> Callable[..., None]:
    """Run a method outside dispatch modes: what it computes is no operation of the step, and watching it would take longer."""

    @functools.wraps(method)
    def unwatched(*arguments: Any) -> None:
        with nullcontext() if _get_current_dispatch_mode() is None else _disable_current_modes():
            method(*arguments)

    return unwatched


class StepRecorder:
    """Records `steps` optimizer steps: the first, the middle and the last are probed, the one after the middle is dispatched.

    An optimizer that takes no part in a probed step, as a generator that steps after every third step of its critic, is probed
    when it steps next.

    Args:
        state: where to record.
        steps: number of steps.
        model, optimizer, schedules: as for `StepObserver`.
    """

    def __init__(
        self,
        state: ObserverState,
        steps: int,
        model: nn.Module | None = None,
        optimizer: Any = None,
        schedules: Sequence[Any] | None = None,
    ) -> None:
        self.state = state
        self.last_step = steps
        self._middle_step = (steps + 1) // 2
        self._model, self._optimizer, self._schedules = model, optimizer, schedules
        self._gradients = GradientRecorder(state)
        self._discovered: TrainingObjects | None = None  # in this step
        self._is_first_call = False  # of this step
        self._latest_probed_step = 0

    def install(self) -> None:
        """Patch torch's calls and count forward passes from now on."""
        self.state.calls.install()
        self.state.forward_hooks.install()
        if isinstance(self._model, nn.Module):
            self.state.objects.models = [self._model]
            self._register_models()
        else:
            self.state.locations.install()

    def remove(self) -> None:
        """Remove all that was installed."""
        self.state.operations.leave()
        self.state.forward_hooks.remove()
        self.state.locations.remove()
        self.state.calls.remove()

    def begin_step(self, step: int) -> None:
        """Begin a step: record its micro-batches and schedules."""
        observation = StepObservation(step=step, is_probed=self._is_probed(step))
        self.state.steps.append(observation)
        self.state.calls.patch_fsdp1()
        self._gradients.begin_step()
        self._discovered = None
        self._is_first_call = True
        if observation.is_probed:
            self._latest_probed_step = step
            observation.micro_batches, observation.called_modules = self.state.forward_hooks.remove()
        observation.record_schedules(self.state.objects.schedules, self.state.skipped)

    def before_call(self, optimizer: Optimizer, tensors: SteppedTensors) -> None:
        """Record rates, and the tensors before an optimizer steps them if it is to be probed."""
        observation = self.state.steps[-1]
        if self._is_first_call and observation.step == 1 and self._model is None:
            self.state.libraries = calling_libraries()
        is_new = id(optimizer) not in self.state.optimizers
        observed = self._register_optimizer(optimizer) if is_new else self.state.optimizers[id(optimizer)]
        if self._is_first_call and self._model is None and self._has_other_models(observation.called_modules):
            self._discovered = self._discover(optimizer)  # the training goes on with another model
        if self._is_first_call:
            observation.ends_epoch = ends_epoch(self.state.objects.accelerator)
        if self._is_first_call and observation.step == self._middle_step:
            self.state.averages.begin_again(observation.step)
        observation.record_rates(optimizer, tensors)
        self.state.operations.note_call()
        if observed.probed_step < self._latest_probed_step or observed.probed_step == observation.step:
            observed.probed_step = observation.step
            observation.probed.update(id(tensor) for _, _, tensor in tensors)
            self._link_masters(optimizer, observed, tensors)
            self._start_probes(optimizer, observed, tensors)
        self._gradients.before_call(optimizer, tensors)
        self._is_first_call = False

    @_unwatched
    def _start_probes(self, optimizer: Optimizer, observed: ObservedOptimizer, tensors: SteppedTensors) -> None:
        step = self.state.steps[-1].step
        for group, _, tensor in tensors:
            probe = self._probe_of(optimizer, group, tensor)
            if probe is None:
                continue
            link = self.state.links.get(id(tensor))
            if link is not None and link.live is not None:
                probe.compare_live(tensor, link.live, before_first_step=step == observed.first_step)
            probe.before_step(optimizer, group, tensor, optimizer_state(optimizer, tensor), step)
            if tensor.grad is not None:
                kind = "gradient" if self.state.is_live(tensor) else "master_gradient"
                self.state.census.count(kind, tensor, tensor.grad)

    def _probe_of(self, optimizer: Optimizer, group: Mapping[str, Any], tensor: Tensor) -> TensorProbe | None:
        """Return the probe of a tensor, started if it is new or was cast; None if the tensor cannot be probed."""
        probe = self.state.probes.get(id(tensor))
        if probe is not None and probe.dtype != tensor.dtype:  # what became of its updates before says nothing about those now
            probe = None
            for observed in self.state.optimizers.values():
                observed.snapshots.pop(id(tensor), None)
        if probe is None and can_probe(tensor):
            probe = self.state.probes[id(tensor)] = TensorProbe()
            probe.start(tensor, optimizer_state(optimizer, tensor), group, self.state.steps[-1].step)
        return probe

    def _has_other_models(self, called: Sequence[nn.Module]) -> bool:
        """Return whether one of the called modules is part of no known model."""
        part_ids = {id(module) for model in self.state.objects.models for module in model.modules()}
        return any(id(module) not in part_ids for module in called)

    def after_call(self, optimizer: Optimizer, tensors: SteppedTensors, closure_calls: int) -> None:
        """Record stepped tensors that are probed, and prepare what the next step needs."""
        observation = self.state.steps[-1]
        self._gradients.after_call(optimizer, tensors, closure_calls)
        if self.state.optimizers[id(optimizer)].probed_step == observation.step:
            self._end_probes(optimizer, tensors)
        if self._is_probed(observation.step + 1):
            self.state.forward_hooks.install()
        if observation.step == self._middle_step < self.last_step:
            self.state.operations.enter()

    @_unwatched
    def _end_probes(self, optimizer: Optimizer, tensors: SteppedTensors) -> None:
        observation, observed = self.state.steps[-1], self.state.optimizers[id(optimizer)]
        for group, index, tensor in tensors:
            state = optimizer_state(optimizer, tensor)
            probe = self.state.probes.get(id(tensor))
            if probe is not None and id(tensor) not in observation.changed_gradients:
                probe.after_step(group, tensor, state, observation.step)
            observed.record(tensor, group, index, state)

    def end_step(self) -> None:
        """Compare the gradients that were stepped in a probed step with their clipping."""
        self._gradients.end_step()

    def finish(self) -> None:
        """Compare live tensors with their masters if no later step did: after it a script may load the best weights."""
        self.state.operations.raise_failure()
        self._record_unstepped()
        if self.state.steps and not any(probe.live_differs is not None for probe in self.state.probes.values()):
            self.compare_live()

    @contextmanager
    def finished_for_now(self) -> Iterator[None]:
        """Return the context in which everything is recorded as by `finish`; a later step is recorded as if it had not been."""
        probes = list(self.state.probes.values())
        was_compared = any(probe.live_differs is not None for probe in probes)
        self.finish()
        yield
        if not was_compared:  # a script may copy its masters after this, and before the next step
            for probe in probes:
                probe.live_differs = None

    def trains(self, module: nn.Module) -> bool:
        """Return whether steps were recorded, and a module is a part of the models that they train."""
        parts = (part for model in self.state.objects.models for part in model.modules())
        return bool(self.state.steps) and any(part is module for part in parts)

    @property
    def expects_copies(self) -> bool:
        """True after a step whose masters are probed, which are copied into live parameters before the next forward pass."""
        return bool(self.state.links and self.state.steps[-1].probed) and self.state.steps[-1].step < self.last_step

    @_unwatched
    def compare_live(self) -> None:
        """Compare live tensors with their masters, of those that the latest step stepped.

        Between steps, but no later than the next forward pass: what is copied after that comes a step late.
        """
        for tensor_id in self.state.steps[-1].stepped:
            link, probe = self.state.links.get(tensor_id), self.state.probes.get(tensor_id)
            if link is None or link.live is None or probe is None:
                continue
            if probe.steps and local_shard(link.live).numel():
                probe.compare_live(link.stepped, link.live, before_first_step=False)

    def _is_probed(self, step: int) -> bool:
        if step == self._middle_step and self.state.operations.by_caller:
            return False
        return step in (1, self._middle_step, self.last_step)

    def _register_optimizer(self, optimizer: Optimizer) -> ObservedOptimizer:
        """Register an optimizer at its first step, and find its model, wrappers and schedules."""
        if self._model is not None:
            chain = optimizer_chain(self._optimizer)
        else:
            # There may be one optimizer for each parameter: the objects of the process are searched once in a step.
            if self._discovered is None or id(optimizer) not in self._discovered.wrappers:
                self._discovered = self._discover(optimizer)
            elif models := self._discovered.further_models(optimizer_tensors(optimizer)):
                self.state.objects.models = [*self.state.objects.models, *models]
                self._register_models()
            chain = self._discovered.chain(optimizer)
        observed = self.state.optimizers[id(optimizer)] = ObservedOptimizer(optimizer, chain, self.state.steps[-1].step)
        return observed

    def _discover(self, optimizer: Optimizer) -> TrainingObjects:
        """Search the objects of the process around the optimizers that step, this one included."""
        optimizers = [*(observed.optimizer for observed in self.state.optimizers.values()), optimizer]
        called_modules = [*self.state.objects.models, *self.state.steps[-1].called_modules]
        objects = discover(optimizers, called_modules, self.state.locations.constructed())
        if self._schedules is not None:
            objects.schedules = list(self._schedules)
        earlier = self.state.objects.schedules  # first in the list, they keep their names
        earlier_ids = set(map(id, earlier))
        objects.schedules = [*earlier, *(schedule for schedule in objects.schedules if id(schedule) not in earlier_ids)]
        self.state.objects = objects
        self._register_models()
        self.state.averages.record(objects.models, objects.others, self.state.steps[-1].step)
        self.state.steps[-1].record_schedules(objects.schedules, self.state.skipped)
        return objects

    def _register_models(self) -> None:
        for model in self.state.objects.models:
            for name, parameter in live_parameters(model):
                self.state.live_names[id(parameter)] = name
                self.state.live_storages.add(storage_address(parameter))
        self.state.live_storages.discard(0)  # the address of all empty shards
        self.state.forward_hooks.roots = {id(model) for model in self.state.objects.models}

    def _link_masters(self, optimizer: Optimizer, observed: ObservedOptimizer, tensors: SteppedTensors) -> None:
        """Link stepped tensors to live parameters. This is repeated in each probed step: DeepSpeed fills its groups late.

        An optimizer that is called for one bucket after another declares all its masters at the first call. Which model runs is
        known only in a probed step: masters that are not declared may have the shapes of another one.
        """
        linked = self.state.steps[-1].linked
        if not self._is_first_call and linked.issuperset(id(tensor) for _, _, tensor in tensors):
            return
        links = list(declared_masters(observed.chain, self.state.live_names))
        if not links and self.state.steps[-1].is_probed:
            links = self._matched_masters(optimizer)
        for link in links:
            self.state.links[id(link.stepped)] = link
            linked.add(id(link.stepped))
        if self._is_first_call:
            self._record_unstepped()
        # Gradients of parameters that are stepped themselves are counted when they are.
        if self._is_first_call or any(not self.state.is_live(tensor) for _, _, tensor in tensors):
            for model in self.state.objects.models:
                for _, parameter in live_parameters(model):
                    if parameter.grad is not None:
                        self.state.census.count("gradient", parameter, parameter.grad)

    def _matched_masters(self, optimizer: Optimizer) -> list[MasterLink]:
        stepped = optimizer_tensors(optimizer)
        if any(self.state.is_live(tensor) for tensor in stepped):
            return []
        named = [pair for model in self.state.objects.models for pair in live_parameters(model)]
        live = list({id(parameter): (name, parameter) for name, parameter in named}.values())  # models may share some
        linked: set[int] = set()
        for tensor_id, link in self.state.links.items():
            if link.live is not None:
                linked |= self.state.covered_ids(tensor_id)
        return list(match_masters(stepped, live, linked))

    def _record_unstepped(self) -> None:
        step, stepped = self.state.steps[-1].step if self.state.steps else 0, self.state.stepped_ids()
        for model in self.state.objects.models:
            trainable = [parameter for _, parameter in live_parameters(model) if parameter.requires_grad]
            self.state.unstepped.record((parameter for parameter in trainable if id(parameter) not in stepped), step)
