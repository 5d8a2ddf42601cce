"""Normalisation between raw units and network units with the statistics of each sample's dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from benchbox.errors import DataError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchbox.registry.contracts import NormalisationMode

EPS = 1e-6

REQUIRED_STATISTICS: dict[NormalisationMode, tuple[str, ...]] = {
    "identity": (),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantile": ("q01", "q99"),
}
"""Statistics that each mode uses."""


class Normaliser(nn.Module):
    """Affine map per dataset and dimension: `normalise(x) = (x - offset) / scale`.

    `mean_std` gives zero mean and unit deviation; `min_max` and `quantile` put [min, max] and [q01, q99] on [-1, 1] without
    clipping. Dimensions without range, and those a dataset does not have, are unchanged (offset 0, scale 1), so that padding
    remains exactly zero. Before `load` there is one dataset, whose map is the identity.

    Offsets and scales are float32 buffers and remain float32 under `.to(torch.bfloat16)`, `.half()` and similar calls, which
    only move them between devices: rounded statistics would shift every action by up to 0.4 % of its offset.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, dim: int, mode: NormalisationMode) -> None:
        super().__init__()
        if mode not in REQUIRED_STATISTICS:
            raise ValueError(f"unknown normalisation {mode!r}: one of {', '.join(REQUIRED_STATISTICS)}")
        self.dim = dim
        self.mode = mode
        self.register_buffer("offset", torch.zeros(1, dim, dtype=torch.float32))  # (datasets, D)
        self.register_buffer("scale", torch.ones(1, dim, dtype=torch.float32))  # (datasets, D)

    def load(self, feature_stats: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Load the statistics of every dataset, as statistic -> values; those that the mode does not use may be missing.

        Raises:
            DataError: a statistic is missing, wider than `dim` or not finite.
        """
        rows = [affine_parameters(stats, self.mode, self.dim, where=f"dataset {i}") for i, stats in enumerate(feature_stats)]
        load_dataset_rows(self, "offset", torch.stack([offset for offset, _ in rows]).float())
        load_dataset_rows(self, "scale", torch.stack([scale for _, scale in rows]).float())

    def normalise(self, x: Tensor, dataset_index: Tensor) -> Tensor:
        """Convert raw units (B, ..., D) to network units, float32. `dataset_index` (B,) selects the statistics."""
        offset, scale = self._rows(x, dataset_index)
        return (x.float() - offset) / scale

    def denormalise(self, x: Tensor, dataset_index: Tensor) -> Tensor:
        """Convert network units to raw units, float32: the inverse of `normalise`."""
        offset, scale = self._rows(x, dataset_index)
        return x.float() * scale + offset

    def _rows(self, x: Tensor, dataset_index: Tensor) -> tuple[Tensor, Tensor]:
        if self.offset.dtype is not torch.float32 or self.scale.dtype is not torch.float32:
            # FSDP1 casts buffers without a call of `_apply` if its mixed precision has a buffer_dtype.
            raise MismatchError(f"normalisation statistics were cast to {self.offset.dtype}; leave buffers in float32")
        shape = (len(x), *[1] * (x.ndim - 2), self.dim)
        return self.offset[dataset_index].view(shape), self.scale[dataset_index].view(shape)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}offset")
        if saved is not None and len(saved) != len(self.offset):
            raise DataError(
                f"the weights come with the statistics of {len(saved)} dataset(s), and the policy has those of "
                f"{len(self.offset)}: load_statistics takes the datasets that it was trained on, in their order"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move_only, recurse)
        return self

    def extra_repr(self) -> str:
        return f"dim={self.dim}, mode={self.mode}, datasets={len(self.offset)}"


def load_dataset_rows(module: nn.Module, name: str, rows: Tensor) -> None:
    """Fill a buffer that has one row per dataset, and replace it first if it has another number of them."""
    buffer: Tensor = getattr(module, name)
    if len(buffer) != len(rows):
        buffer = buffer.new_empty((len(rows), *buffer.shape[1:]))
        setattr(module, name, buffer)
    buffer.copy_(rows)


def finite_statistic(values: object, where: str) -> Tensor:
    """Return a statistic as float64, in its own shape.

    Raises:
        DataError: it holds anything but numbers that are finite in float32, in which they are used.
    """
    try:
        statistic = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DataError(f"{where} holds {values!s:.60}, and a list of numbers is expected; recompute it") from None
    if not bool((finite := statistic.float().isfinite()).all()):
        dimension = int(finite.flatten().int().argmin())
        number = statistic.flatten()[dimension].item()
        raise DataError(f"{where} is {number} in dimension {dimension}, and no value can be normalised by it; recompute it")
    return statistic


def affine_parameters(
    stats: Mapping[str, Sequence[float]], mode: NormalisationMode, dim: int, where: str
) -> tuple[Tensor, Tensor]:
    """Compute offset and scale, both (dim,) float64, of a feature of one dataset.

    They are the identity for dimensions without range and beyond the width of the feature.

    Raises:
        DataError: a statistic that the mode uses is missing, wider than `dim`, or holds anything but finite numbers.
    """
    offset, scale = torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)
    values = []
    for name in REQUIRED_STATISTICS[mode]:
        if name not in stats:
            usable_modes = [usable for usable, keys in REQUIRED_STATISTICS.items() if all(key in stats for key in keys)]
            raise DataError(
                f"{where}: {mode} normalisation needs the statistic {name!r}, which is missing; "
                f"recompute the dataset's statistics, or normalise by {' or '.join(usable_modes)}"
            )
        value = finite_statistic(stats[name], f"{where}: statistic {name!r}")
        if value.ndim != 1 or len(value) > dim:
            raise DataError(
                f"{where}: statistic {name!r} has shape {tuple(value.shape)}, and the policy takes {dim} dimensions"
            )
        values.append(value)
    if not values:
        return offset, scale
    low, high = values  # or mean and standard deviation
    if len(low) != len(high):
        names = " and ".join(REQUIRED_STATISTICS[mode])
        raise DataError(f"{where}: statistics {names} have {len(low)} and {len(high)} dimensions")
    if mode == "mean_std":
        spread, centre, unit = high, low, high + EPS
    else:
        spread = high - low
        unit = (spread + EPS) / 2
        centre = low + unit
    has_range = spread > EPS
    offset[: len(has_range)][has_range] = centre[has_range]
    scale[: len(has_range)][has_range] = unit[has_range]
    return offset, scale
