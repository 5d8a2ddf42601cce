"""Loading a policy from a checkpoint of any backend, without starting ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchbox.backends.deferred import allocate, materialise_policy, take_deferred_weights
from benchbox.backends.state import AVERAGES, BUFFERS, WEIGHTS
from benchbox.dcp.files import TensorFolder
from benchbox.dcp.shards import full_shards
from benchbox.errors import DataError, UnsupportedError
from benchbox.observer.introspect.names import live_buffers, live_parameters, unwrapped_modules
from benchbox.registry.attention import NATIVE, attention_kernels
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import policy_entry
from benchbox.session.build import load_cell_weights
from benchbox.session.construction import construct_policy
from benchbox.spec.cell import Cell
from benchbox.store.checkpoints import TENSORS, damage_of, find_checkpoint, read_manifest
from benchbox.trainer.checkpoint.state import drawn_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchbox.registry.contracts import AttentionKernel, Policy


def load_policy(
    checkpoint: Path, policy_dirs: Sequence[Path] = (), *, averages: bool = False, attention: AttentionKernel = "eager"
) -> Policy:
    """Load the policy of a checkpoint on the CPU, in float32, in evaluation mode and with the statistics of its datasets.

    Weights are those that the optimizer steps: masters where there are masters.

    Args:
        checkpoint: a folder `step-<n>`, or that of a training, whose newest checkpoint is taken.
        policy_dirs: additional folders of policies.
        averages: take the averages of the weights that were trained, such as their EMA, in place of the weights.
        attention: the kernel, unless the policy cannot switch to it.

    Raises:
        DataError: the checkpoint is damaged, or has no averages.
        ConfigurationError: there is no such policy.
        UnsupportedError: frozen weights that the checkpoint leaves out cannot be computed here.
    """
    checkpoint = find_checkpoint(checkpoint)
    if (damage := damage_of(checkpoint)) is not None:
        raise DataError(f"{checkpoint}: damaged checkpoint ({damage}); use another one")
    manifest = read_manifest(checkpoint)
    cell = Cell.from_dict(manifest.cell)
    is_switched = cell.attention != NATIVE and attention in attention_kernels(policy_entry(cell.policy, policy_dirs))
    cell = replace(cell, attention=attention if is_switched else cell.attention, checkpointing=False, compile="off")
    axes = Axes(cams=cell.cams, attention=cell.attention, checkpointing=False, mode=cell.data.mode)
    policy = construct_policy(cell, axes, torch.device("cpu"), policy_dirs)
    assert isinstance(policy, nn.Module)
    folder = TensorFolder(checkpoint / TENSORS)
    if manifest.trainable_only:  # what was frozen is computed, and loaded, as the training did
        is_complete = all(f"{WEIGHTS}{name}" in folder.layout for name, _ in live_parameters(policy))
        if cell.weights is None and not is_complete and drawn_on(folder.layout) == "cuda":
            message = "its frozen weights were drawn on a GPU, whose generator a CPU does not have, and are not in it"
            raise UnsupportedError(f"{checkpoint}: {message}; train with checkpoint.trainable_only: false, or from weights")
        materialise_policy(policy)
        load_cell_weights(cell, policy)
    elif take_deferred_weights(policy) is not None:
        allocate(policy.modules(), torch.device("cpu"), {})
    _fill(policy, folder, complete=not manifest.trainable_only, averages=averages)
    return policy.eval()


@torch.no_grad()
def _fill(policy: nn.Module, folder: TensorFolder, *, complete: bool, averages: bool) -> None:
    """Read the tensors of a policy, those of which there is an average from that."""
    layout = folder.layout
    if averages and not any(key.startswith(AVERAGES) for key in layout):
        raise DataError(f"{folder.path.parent}: has no averages of the weights; train with an EMA, or load the weights")
    tensors: dict[str, Tensor] = {}
    for name, parameter in live_parameters(policy):
        key = f"{AVERAGES}{name}" if averages and f"{AVERAGES}{name}" in layout else f"{WEIGHTS}{name}"
        if key in layout or complete:
            tensors[key] = parameter
    _resize_buffers(
        policy, {key.removeprefix(BUFFERS): tuple(entry.size) for key, entry in layout.items() if key.startswith(BUFFERS)}
    )
    tensors |= {f"{BUFFERS}{name}": buffer for name, buffer in live_buffers(policy)}
    if missing := [key for key in tensors if key not in layout]:
        raise DataError(f"{folder.path.parent}: has no {missing[0]}; the policy has changed since it was saved")
    folder.read_into({key: full_shards(tensor) for key, tensor in tensors.items()})


def _resize_buffers(policy: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Replace buffers whose saved shape is another one: statistics have a row for each dataset."""
    for prefix, module in unwrapped_modules(policy):
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001 (named_buffers repeats the buffers of children)
            shape = shapes.get(f"{prefix}.{name}" if prefix else name)
            if buffer is not None and shape is not None and shape != tuple(buffer.shape):
                if shape[1:] != tuple(buffer.shape[1:]):
                    raise UnsupportedError(f"buffer {name} has shape {shape} there and {tuple(buffer.shape)} here")
                module._buffers[name] = buffer.new_empty(shape)  # noqa: SLF001
