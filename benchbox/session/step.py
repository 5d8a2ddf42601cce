"""The training step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchbox.errors import UnsupportedError
from benchbox.measure.phases import NONE, Instrument
from benchbox.optim import SpikeGuard, WeightAverages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from benchbox.backends.base import Backend
    from benchbox.registry.contracts import Batch, Losses
    from benchbox.registry.weights import LoadedWeights
    from benchbox.spec.optim import OptimSpec


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step. Tensors stay on the device: reading one waits for the step, so read late.

    `loss` is the mean over all ranks and micro-batches, `grad_norm` the global norm before clipping, both () float32;
    `parts` the named terms of the loss, means over the samples of this rank that have them, and `part_counts` the numbers of
    these samples; `samples` the number that this rank consumed; `lr` the rate of each parameter group in this step. `skipped`
    is whether the gradient norm was a spike and the weights are as they were.
    """

    loss: Tensor
    grad_norm: Tensor
    parts: dict[str, Tensor]
    samples: int
    lr: tuple[float, ...]
    part_counts: dict[str, Tensor]
    skipped: bool = False


class Session:
    """A prepared policy and the step that trains it.

    `loaded` names the published weights that were loaded, if any. `averages` and `spikes` are those that `optim.ema_decay` and
    `optim.spike` ask for.
    """

    def __init__(
        self, backend: Backend, *, accumulation: int, loaded: LoadedWeights | None = None, optim: OptimSpec | None = None
    ) -> None:
        self.backend = backend
        self.accumulation = accumulation
        self.loaded = loaded
        self.averages: WeightAverages | None = None
        self.spikes: SpikeGuard | None = None
        if optim is not None and optim.ema_decay is not None:
            self.averages = WeightAverages(backend.stepped_tensors(), optim.ema_decay, warmup=optim.ema_warmup)
        if optim is not None and optim.spike is not None:
            self.spikes = SpikeGuard(optim.spike)

    @property
    def model(self) -> nn.Module:
        """The wrapped policy, to be called."""
        return self.backend.prepared.model

    @property
    def device(self) -> torch.device:
        return self.backend.device

    def step(self, micro_batches: Iterable[Batch], instruments: Instrument = NONE) -> StepResult:
        """Take one optimizer step over the next `accumulation` micro-batches.

        Args:
            micro_batches: source of batches; `next` is called inside the step, so that waiting for data counts.
            instruments: called at the start and end of every phase.

        Raises:
            StopIteration: the data ended inside the step.
        """
        backend, phase = self.backend, instruments.phase
        batches: Iterator[Batch] = iter(micro_batches)
        parts = _PartSums()
        samples = 0
        with instruments.step():  # all work on the device is inside, so that none of it is missing from the time of a step
            if backend.begin_step() and self.spikes is not None:
                self.spikes.forget()
            loss = torch.zeros((), device=self.device)
            for micro in range(self.accumulation):
                boundary = micro == self.accumulation - 1
                with phase("data_wait"):
                    batch = self._to_device(next(batches))
                batch_samples = next(iter(batch.values())).shape[0]
                samples += batch_samples
                with backend.context(boundary=boundary):
                    with phase("forward"), backend.compute():
                        losses: Losses = backend.prepared.model(batch)
                    with phase("backward"):
                        backend.backward(losses.total, boundary=boundary)
                loss += losses.total.detach()
                parts.add(losses, batch_samples)
            if "clip" not in backend.fused_phases:
                with phase("clip"):
                    backend.clip()
            rates = tuple(float(group["lr"]) for group in backend.prepared.stepping.param_groups)
            with phase("optimizer"):
                skipped = self.spikes is not None and self.spikes.skips(backend.norm_of_step())
                (backend.skip_step if skipped else backend.step)()
            with phase("zero_grad"):
                backend.zero_grad()
                backend.prepared.schedule.step()
            with phase("sync"):
                mean_loss = backend.mean_over_ranks(loss / self.accumulation)
                means = parts.means()
            if self.averages is not None and not skipped:
                with phase("average"):
                    self.averages.update(backend.stepped_tensors())
        return StepResult(
            loss=mean_loss,
            grad_norm=backend.grad_norm,
            parts=means,
            samples=samples,
            lr=rates,
            part_counts=parts.counts,
            skipped=skipped,
        )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Losses:
        """Return the losses of a batch, with those per sample if the policy has them, in the precision of a step.

        All ranks must call it together. Modules stay in the mode in which they are.
        """
        with self.backend.compute():
            losses: Losses = self.backend.prepared.model(self._to_device(batch), per_sample=True)
        return losses

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Return the context in which the model has its averaged weights; afterwards it has its own again, bit for bit.

        All ranks must enter and leave it together, between steps. Inside, this rank holds a copy of what it steps. After an
        exception, which the other ranks may not have, only what this rank steps is restored, and the model computes with it
        after the next step.

        Raises:
            UnsupportedError: there are no averages.
        """
        if self.averages is None:
            raise UnsupportedError("this session keeps no averages of the weights: set optim.ema_decay")
        stepped = self.backend.stepped_tensors()
        trained = {name: tensor.clone() for name, tensor in stepped.items()}
        self._write_weights(self.averages.tensors)
        try:
            yield
        except BaseException:
            self._write_stepped(trained)
            raise
        self._write_weights(trained)

    @torch.no_grad()
    def _write_weights(self, values: Mapping[str, Tensor]) -> None:
        self._write_stepped(values)
        self.backend.refresh_live()

    @torch.no_grad()
    def _write_stepped(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self.backend.stepped_tensors().items():
            tensor.copy_(values[name])

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


class _PartSums:
    """Sums over samples of the reported parts, and the numbers of samples that have them: means of micro-batches do not add."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(self, losses: Losses, samples: int) -> None:
        """Add the parts of a micro-batch; those without a number are of all its `samples`."""
        for name, part in losses.parts.items():
            count = None if losses.counts is None else losses.counts.get(name)
            if count is None:
                count = torch.full_like(part, samples, dtype=torch.float32)
            self.sums[name] = self.sums[name] + part * count if name in self.sums else part * count
            self.counts[name] = self.counts[name] + count if name in self.counts else count

    def means(self) -> dict[str, Tensor]:
        """Return the mean of every part over the samples that have it, and 0 where none has."""
        return {name: total / self.counts[name].clamp(min=1.0) for name, total in self.sums.items()}
