"""Raw units to network units and back, by the statistics of the dataset a sample came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from benchbox.errors import DataError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchbox.registry.contracts import NormalisationMode

EPS = 1e-6

NEEDED: dict[NormalisationMode, tuple[str, ...]] = {
    "identity": (),
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantile": ("q01", "q99"),
}
"""The statistics each mode reads."""


class Normaliser(nn.Module):
    """An affine map per dataset and dimension: `normalise(x) = (x - offset) / scale`.

    `mean_std` gives zero mean and unit deviation; `min_max` and `quantile` put [min, max] and [q01, q99] on [-1, 1] without
    clipping. Dimensions without range, and those a dataset does not have, are left alone (offset 0, scale 1), so that padding
    stays exactly zero. Before `load` everything is the identity.

    Offsets and scales are float32 buffers and stay so under `.to(torch.bfloat16)`, `.half()` and the like, which move them
    between devices only: rounded statistics shift every action by up to 0.4 % of its offset.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, dim: int, mode: NormalisationMode, datasets: int = 1) -> None:
        super().__init__()
        if mode not in NEEDED:
            raise ValueError(f"unknown normalisation {mode!r}: one of {', '.join(NEEDED)}")
        self.dim = dim
        self.mode = mode
        self.register_buffer("offset", torch.zeros(datasets, dim, dtype=torch.float32))  # (datasets, D)
        self.register_buffer("scale", torch.ones(datasets, dim, dtype=torch.float32))  # (datasets, D)

    def load(self, feature_stats: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Take one mapping statistic -> values for every dataset; statistics the mode does not read may be missing.

        Raises:
            DataError: another number of datasets than this was built for, a statistic missing, or wider than `dim`.
        """
        if len(feature_stats) != len(self.offset):
            raise DataError(f"statistics of {len(feature_stats)} dataset(s) for a policy built for {len(self.offset)}")
        rows = [affine(stats, self.mode, self.dim, where=f"dataset {i}") for i, stats in enumerate(feature_stats)]
        self.offset.copy_(torch.stack([offset for offset, _ in rows]))
        self.scale.copy_(torch.stack([scale for _, scale in rows]))

    def normalise(self, x: Tensor, dataset_index: Tensor) -> Tensor:
        """Raw units (B, ..., D) to network units, float32; `dataset_index` (B,) says whose statistics apply."""
        offset, scale = self._rows(x, dataset_index)
        return (x.float() - offset) / scale

    def denormalise(self, x: Tensor, dataset_index: Tensor) -> Tensor:
        """The inverse of `normalise`, float32."""
        offset, scale = self._rows(x, dataset_index)
        return x.float() * scale + offset

    def _rows(self, x: Tensor, dataset_index: Tensor) -> tuple[Tensor, Tensor]:
        if self.offset.dtype is not torch.float32 or self.scale.dtype is not torch.float32:
            # FSDP1 casts buffers behind the module's back when its mixed precision names a buffer_dtype.
            raise MismatchError(f"normalisation statistics were cast to {self.offset.dtype}; leave buffers in float32")
        shape = (len(x), *[1] * (x.ndim - 2), self.dim)
        return self.offset[dataset_index].view(shape), self.scale[dataset_index].view(shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move_only, recurse)
        return self

    def extra_repr(self) -> str:
        return f"dim={self.dim}, mode={self.mode}, datasets={len(self.offset)}"


def affine(
    stats: Mapping[str, Sequence[float]], mode: NormalisationMode, dim: int, where: str = "the dataset"
) -> tuple[Tensor, Tensor]:
    """(offset, scale) of one dataset's feature, both (dim,) float32, identity where there is no range and beyond its width.

    Raises:
        DataError: a statistic the mode reads is missing, or wider than `dim`.
    """
    offset, scale = torch.zeros(dim), torch.ones(dim)
    values = []
    for name in NEEDED[mode]:
        if name not in stats:
            others = [other for other, needed in NEEDED.items() if all(key in stats for key in needed)]
            raise DataError(
                f"{where}: {mode} normalisation needs the statistic {name!r}, which is missing; "
                f"recompute the dataset's statistics, or normalise by {' or '.join(others)}"
            )
        value = torch.as_tensor(stats[name], dtype=torch.float64)
        if value.ndim != 1 or len(value) > dim:
            raise DataError(
                f"{where}: statistic {name!r} has shape {tuple(value.shape)}, and the policy takes {dim} dimensions"
            )
        values.append(value)
    if not values:
        return offset, scale
    first, second = values
    if len(first) != len(second):
        raise DataError(f"{where}: statistics {' and '.join(NEEDED[mode])} have {len(first)} and {len(second)} dimensions")
    if mode == "mean_std":
        spread, centre, unit = second, first, second + EPS
    else:
        spread = second - first
        unit = (spread + EPS) / 2
        centre = first + unit
    real = spread > EPS
    offset[: len(real)][real] = centre[real].float()
    scale[: len(real)][real] = unit[real].float()
    return offset, scale
