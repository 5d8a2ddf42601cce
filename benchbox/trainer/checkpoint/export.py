"""Export of the weights in a checkpoint as one safetensors file."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from benchbox.errors import DataError, UnsupportedError, reason_of
from benchbox.observer.introspect.names import live_buffers, live_parameters
from benchbox.store.checkpoints import find_checkpoint, read_manifest
from benchbox.trainer.checkpoint.loading import load_policy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.registry.contracts import Policy

ExportFormat = Literal["benchbox", "openpi", "lerobot"]
_FILE = "model.safetensors"
_LEROBOT_PREFIX = "model."


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    policy_dirs: Sequence[Path] = (),
    *,
    names: ExportFormat = "benchbox",
    dtype: torch.dtype = torch.float32,
    averages: bool = False,
) -> Path:
    """Write the weights of a checkpoint, of any backend, to a safetensors file, without starting ranks. Return its path.

    Args:
        out: the file, or a folder, in which it is `model.safetensors`.
        names: the policy's own names, with its buffers; or those of openpi or LeRobot, which have weights only.
        dtype: floating weights are rounded to it from those that the optimizer steps. Buffers keep their dtype.
        averages: export the averages of the weights in their place.

    Raises:
        DataError: the checkpoint is damaged, has no averages, or the file exists or cannot be written.
        UnsupportedError: openpi and LeRobot have no such policy.
    """
    checkpoint = find_checkpoint(checkpoint)
    path = out if out.suffix == ".safetensors" else out / _FILE
    if path.exists():
        raise DataError(f"{path}: exists; remove it, or export to another file")
    policy = load_policy(checkpoint, policy_dirs, averages=averages)
    tensors = _named_tensors(policy, names, dtype)
    manifest = read_manifest(checkpoint)
    metadata = {"format": "pt", "policy": manifest.cell["policy"], "size": manifest.cell["size"], "steps": str(manifest.steps)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.touch()
    mode = partial.stat().st_mode
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
    except SafetensorError as error:
        with suppress(OSError):
            partial.unlink()
        raise DataError(f"{path}: could not be written ({reason_of(error)})") from None
    partial.chmod(mode)  # safetensors replaces it by a file that only this user may read
    partial.replace(path)
    return path


def _named_tensors(policy: Policy, names: ExportFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    assert isinstance(policy, nn.Module)
    if names == "benchbox":
        weights = {name: parameter.detach().to(dtype) for name, parameter in live_parameters(policy)}
        return weights | {name: buffer.clone() for name, buffer in live_buffers(policy)}
    publish: Any = getattr(policy, "published_state_dict", None)
    if publish is None:
        raise UnsupportedError(
            f"{type(policy).__name__} cannot be exported: {names} has no such policy; they have pi0 and pi05"
        )
    prefix = _LEROBOT_PREFIX if names == "lerobot" else ""
    return {f"{prefix}{name}": tensor.to(dtype) for name, tensor in publish().items()}
