"""Estimate of a cell: memory, communication and FLOPs, before anything runs.

    estimate(cell).peak_bytes

Nothing is allocated on a device, and no rank is started. The policy is built on the meta device, and its step is traced once,
on fake tensors unless it is a small one. Every backend, recipe of the same dtypes, number of ranks and accumulation is computed
from that trace.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchbox.backends.base import DTYPES
from benchbox.backends.deferred import materialise_policy
from benchbox.data.loading.loader import open_samples, stacked_samples
from benchbox.data.loading.packing import pack
from benchbox.data.order.frames import SampleKey
from benchbox.data.samples.mixture import MixtureSamples
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.errors import DataError, UnsupportedError
from benchbox.estimation.extent import MAX_SAMPLES_READ, read_extent
from benchbox.estimation.fake import make_fake, make_fake_batch, new_fake_mode
from benchbox.estimation.groups import fake_process_group
from benchbox.estimation.parts import fixed_parts, read_parts, smallest_share
from benchbox.estimation.structure import module_names, read_structure, unit_modules
from benchbox.estimation.tracing import trace_step
from benchbox.optim import freeze, plan_groups
from benchbox.registry.backends import DEFAULT_SHARD_SIZE, backend_info
from benchbox.registry.contracts import Axes
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.recipes import STATES_PER_ELEMENT, recipe_by_name
from benchbox.session.build import generated_samples, trimmable_parts
from benchbox.session.construction import construct_policy
from benchbox.theory.prediction import Estimate, predict
from benchbox.theory.sharding import MODELS
from benchbox.theory.structure import CellSetup, Structure, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Literal

    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchbox.data.loading.loader import SampleSource
    from benchbox.data.loading.trimming import Extent
    from benchbox.estimation.parts import Parts
    from benchbox.registry.contracts import Batch, BatchSpec, Policy
    from benchbox.spec.cell import Cell

_MOST_SAMPLES = 8  # of the global batch that are read to see which optional parts it has
# Parameters times samples. Up to here a step on real tensors takes less time than one on fake tensors, where even the smallest
# operation is slow: 0.2 s and 0.9 s for a tiny policy, 1.2 s and 1.9 s for 33 M parameters and two samples.
MAX_REAL_WORK = 2**26
_TRIMMED = "with all cameras and the longest texts of {step}: a batch with a longer text or more cameras needs more memory"
_WHOLE = (
    "with full padding, than which no batch needs more memory: a step has more samples than are read to see how long their "
    f"texts are, which are {MAX_SAMPLES_READ}"
)
_CPU_KERNELS = "traced with the kernels of a CPU: those of a GPU may keep other results for backward, and need workspaces"
_Trace = tuple[Structure, Timeline, tuple[str, ...]]


class Estimator:
    """Estimates the cells of a matrix, and traces each policy, batch and precision once.

    Args:
        policy_dirs: where policies are looked for first.
        device: what the cells would run on.
    """

    def __init__(self, policy_dirs: Sequence[Path] = (), device: Literal["cpu", "cuda"] = "cpu") -> None:
        self._policy_dirs, self._device = policy_dirs, device
        self._traces: dict[tuple[Cell, tuple[Parts, ...] | None, int, int | None], _Trace] = {}

    def estimate(self, cell: Cell, step: int | None = None) -> Estimate:
        """Return the prediction for a cell.

        Args:
            step: the number of the step that is predicted, from 0 on. It matters under ZeRO-3, where the parameters that a step
                fetches depend on the modules that the steps before it used, while a backbone is frozen, and under `padding:
                longest`, where steps differ in size. None: one after others like it, of the size of the first.

        Raises:
            ConfigurationError: there is no such policy, size or recipe, or its data cannot be brought into its form.
            UnsupportedError: there is no formula for the backend, for compiled steps, for those of a frozen backbone or for the
                state of the optimizer, the policy's step cannot be traced, or the backend does not take its parameters.
        """
        if cell.backend not in MODELS:
            raise UnsupportedError(f"there is no formula for the memory of backend {cell.backend}")
        if cell.compile != "off":
            raise UnsupportedError("what a compiled graph keeps for its backward, and its buffers, are not predicted")
        if step is not None and step < cell.optim.freeze_backbone_steps:
            frozen = f"for {cell.optim.freeze_backbone_steps} steps (optim.freeze_backbone_steps)"
            raise UnsupportedError(f"the backbone is frozen {frozen}: such steps are not predicted")
        if (optimizer := recipe_by_name(cell.recipe).optimizer) not in STATES_PER_ELEMENT:
            raise UnsupportedError(f"what {optimizer} of recipe {cell.recipe} keeps for each parameter is not known")
        structure, timeline, notes = self._trace(cell, step)
        has_scalars = any(not parameter.shape for parameter in structure.parameters)
        if has_scalars and not backend_info(cell.backend).load().takes_scalars:
            raise UnsupportedError(f"{cell.policy} has scalar parameters, which {cell.backend} cannot shard")
        return predict(structure, timeline, _setup(cell, self._device), notes)

    def _trace(self, cell: Cell, step: int | None) -> tuple[Structure, Timeline, tuple[str, ...]]:
        recipe = recipe_by_name(cell.recipe)
        traced = replace(
            cell, backend="zero3" if cell.backend == "zero3" else "", shard_size=None, accumulation=1, seed=0,
            recipe=f"{recipe.storage} {recipe.compute}", world_size=min(cell.world_size, _MOST_SAMPLES),
        )  # fmt: skip
        most_samples, sized_step = _MOST_SAMPLES, None
        if cell.padding != "full":  # then all samples of the step decide how large the traced batch is
            traced, most_samples, sized_step = replace(traced, seed=cell.seed), MAX_SAMPLES_READ + 1, step or 0
        key = traced, self._varying_parts(cell, step), min(cell.samples_per_step, most_samples), sized_step
        if key not in self._traces:
            self._traces[key] = _trace_cell(cell, self._policy_dirs, key[1], step or 0)
        structure, timeline, notes = self._traces[key]
        return structure, timeline, (*notes, *([_CPU_KERNELS] if self._device == "cuda" else []))

    def _varying_parts(self, cell: Cell, step: int | None) -> tuple[Parts, ...] | None:
        """Return the optional parts in every micro-step up to the end of a step, or None where they do not matter."""
        if step is None or cell.backend != "zero3":
            return None
        try:
            parts = read_parts(cell, _construct(cell, self._policy_dirs), step + 1)
        except DataError:  # the dataset is not on this machine: see `_open_samples`
            return None
        return parts if len(set(parts)) > 1 else None


def estimate(
    cell: Cell, policy_dirs: Sequence[Path] = (), device: Literal["cpu", "cuda"] = "cpu", step: int | None = None
) -> Estimate:
    """Return the prediction for one cell. For several use an `Estimator`, which shares traces."""
    return Estimator(policy_dirs, device).estimate(cell, step)


def _setup(cell: Cell, device: Literal["cpu", "cuda"]) -> CellSetup:
    recipe = recipe_by_name(cell.recipe)
    live = DTYPES[recipe.storage].itemsize
    is_replicated = cell.backend in ("single", "ddp")
    # What a recipe leaves to the backend: FSDP under accelerate and DeepSpeed keep float32, the others what they are given.
    stepped = DTYPES[recipe.stepped].itemsize if recipe.stepped else live if is_replicated else torch.float32.itemsize
    return CellSetup(
        backend=cell.backend,
        world_size=cell.world_size,
        shard_size=cell.shard_size or DEFAULT_SHARD_SIZE,
        accumulation=cell.accumulation,
        live_size=live,
        stepped_size=stepped,
        moment_size=stepped,
        states=STATES_PER_ELEMENT[recipe.optimizer],
        masters=recipe.masters if is_replicated else cell.backend.startswith("zero"),
        spike_guard=cell.optim.spike is not None,
        averages=cell.optim.ema_decay is not None,
        device=device,
    )


def _construct(cell: Cell, policy_dirs: Sequence[Path]) -> Policy:
    axes = Axes(cams=cell.cams, attention=cell.attention, checkpointing=cell.checkpointing, mode=cell.data.mode)
    return construct_policy(cell, axes, torch.device("cpu"), policy_dirs)


def _trace_cell(cell: Cell, policy_dirs: Sequence[Path], parts: tuple[Parts, ...] | None, step: int) -> _Trace:
    """Return the trace of a step: of the last micro-step of those with these parts, or one like all before it."""
    recipe = recipe_by_name(cell.recipe)
    policy = _construct(cell, policy_dirs)
    assert isinstance(policy, nn.Module)
    is_real = sum(parameter.numel() for parameter in policy.parameters()) * cell.batch <= MAX_REAL_WORK
    if is_real:
        materialise_policy(policy)
    freeze(policy, policy.parameter_roles(), FREEZE_PRESETS[cell.freeze])
    samples, spec, notes = _open_samples(cell, policy)
    statistics = getattr(samples, "statistics", None)
    if statistics:
        policy.load_statistics(list(statistics))
    plans = plan_groups(policy, policy.parameter_roles(), cell.optim)
    trimmable = trimmable_parts(cell, spec)
    is_own_data = not notes
    of_step = read_extent(cell, samples, trimmable, step) if trimmable else None
    if trimmable:
        note = _WHOLE if of_step is None else _TRIMMED.format(step=f"step {step}" if step else "the first step")
        notes = (*notes, note)
    batch, batch_bytes = _read_batch(cell, samples, None if of_step is None else of_step.extent)
    share = smallest_share(policy, batch, parts[-1] if parts else None)
    policy.to(DTYPES[recipe.storage])
    mode: FakeTensorMode | nullcontext[None] = nullcontext()
    if not is_real:
        mode = new_fake_mode()
        make_fake(policy, mode)
        batch = make_fake_batch(batch, mode)
    structure = read_structure(policy, plans, batch_bytes)

    def trace(present: Parts | None) -> Timeline:
        with fake_process_group(cell.world_size), fixed_parts(policy, present):
            return trace_step(
                policy,
                batch,
                mode,
                units=unit_modules(policy, "fsdp1") | unit_modules(policy, "fsdp2"),
                uses=module_names(policy) if cell.backend == "zero3" else None,
                autocast=DTYPES[recipe.compute] if recipe.storage != recipe.compute else None,
            )

    try:
        timeline = trace(parts[-1] if parts else None)
        if parts:
            timeline = _with_earlier(timeline, parts, trace)
    except Exception as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        message = f"the step of {cell.policy} cannot be traced: {type(error).__name__}: {reason}"
        raise UnsupportedError(message) from error
    has_size_of_step = not trimmable or (of_step is not None and of_step.is_reached and is_own_data)
    return structure, replace(timeline, smallest_share=share, has_size_of_step=has_size_of_step), notes


def _with_earlier(timeline: Timeline, parts: tuple[Parts, ...], trace: Callable[[Parts], Timeline]) -> Timeline:
    """Return a timeline with the uses of modules in the micro-steps before it, of which `parts` has the optional parts."""
    timelines = {parts[-1]: timeline}
    for present in parts:
        if present not in timelines:
            timelines[present] = trace(present)
    external: dict[str, tuple[int, ...]] = {}
    for other in timelines.values():
        external |= {name: (*external.get(name, ()), *numbers) for name, numbers in other.external.items()}
    return replace(timeline, earlier=tuple(timelines[present].uses for present in parts[:-1]), external=external)


def _open_samples(cell: Cell, policy: Policy) -> tuple[SampleSource, BatchSpec | None, tuple[str, ...]]:
    """Return the samples of the cell, their form unless the policy generates them itself, and notes on them.

    Samples are generated in the same form where the dataset is not on this machine.
    """
    own_samples = generated_samples(cell, policy)
    if own_samples is not None:
        return own_samples, None, ()
    spec = policy.batch_spec()
    try:
        return open_samples(cell.data, spec, cell.seed), spec, ()
    except DataError as error:
        note = f"with generated samples, in which every optional part is present, because {str(error).strip().splitlines()[0]}"
        return SyntheticSamples(spec, cell.seed), spec, (note,)


def _read_batch(cell: Cell, samples: SampleSource, extent: Extent | None = None) -> tuple[Batch, int]:
    """Return a micro-batch of a rank, and the bytes of the memory that it is packed in.

    A mask of the first sample is set wherever it is set in any sample of the global batch, because the ranks agree on the
    optional parts that any of them has.

    Args:
        extent: to which the batch is cut; None: with all padding.
    """
    frames = len(samples) if isinstance(samples, MixtureSamples) else None

    def keys(start: int, stop: int) -> list[SampleKey]:  # a batch may have more samples than a dataset has frames
        return [SampleKey(0, index if frames is None else index % frames) for index in range(start, stop)]

    parts = stacked_samples(samples, keys(0, cell.batch))
    others = stacked_samples(samples, keys(cell.batch, min(cell.samples_per_step, _MOST_SAMPLES)))
    if extent is not None:
        parts, others = [extent.cut(part) for part in parts], [extent.cut(part) for part in others]
    packed = pack(parts)
    batch = packed.unpack()
    for part in others:
        for name, values in part.items():
            if values.dtype == torch.bool:
                batch[name][0] |= values.any(dim=0)
    return batch, packed.memory.nbytes
