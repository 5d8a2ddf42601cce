"""Padding of a whole micro-batch, which is left out on the host: cameras that no sample has, and the ends of its texts.

No valid token attends to padding, and positions count valid tokens only, so that losses and gradients are those of the whole
batch but for rounding. The policy says for which parts of its batches that holds (`BatchSpec.trimmable`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from benchbox.registry.contracts import CAMERA_DIMS, CAMERA_MASKS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from benchbox.registry.contracts import Batch

# Texts are cut to a multiple of this many tokens. 16-bit products want sizes that are multiples of 8 or 16; with 32 a text
# would keep 8 tokens of padding more on average. That there are twice as many lengths costs nothing in eager steps, and
# torch.compile makes a length dynamic when it meets the second one.
MULTIPLE = 16
CAMERAS = "cameras"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Needed part of a micro-batch: the columns of cameras that any sample has, and the length of each text.

    `cameras` is None where no column may be left out, and a text that must not be cut is not in `lengths`.
    """

    cameras: Tensor | None  # (C,) int64
    lengths: Mapping[str, int]

    @classmethod
    def of(cls, parts: Sequence[Batch], trimmable: Collection[str]) -> Self:
        """Return the extent of stacked samples, which may be in several parts: at least one camera, and `MULTIPLE` tokens.

        What has no mask is real in all its samples, so that nothing of it may be left out.
        """
        texts = [name for name in trimmable if name != CAMERAS and all(f"{name}_mask" in part for part in parts)]
        return cls(
            cameras=_present_cameras(parts) if CAMERAS in trimmable else None,
            lengths={name: _longest([part[f"{name}_mask"] for part in parts]) for name in texts},
        )

    def cut(self, batch: Batch) -> Batch:
        """Return stacked samples without what is beyond this extent."""
        cut = dict(batch)
        if self.cameras is not None:
            for name, dim in CAMERA_DIMS.items():
                if name in batch and len(self.cameras) < batch[name].shape[dim]:
                    cut[name] = batch[name].index_select(dim, self.cameras)
        for text, length in self.lengths.items():
            cut |= {name: batch[name][..., :length] for name in (f"{text}_tokens", f"{text}_mask") if name in batch}
        return cut


def trim(parts: Sequence[Batch], trimmable: Collection[str]) -> Sequence[Batch]:
    """Return the parts of one micro-batch without the padding that all its samples share; as they are if nothing may be cut."""
    if not (parts and trimmable):
        return parts
    extent = Extent.of(parts, trimmable)
    return [extent.cut(part) for part in parts]


def _present_cameras(parts: Sequence[Batch]) -> Tensor | None:
    """Return the columns (C,) int64 of the cameras that any sample has, at least one; None where none may be left out."""
    if any(images in part and mask not in part for part in parts for images, mask in CAMERA_MASKS.items()):
        return None
    masks = [part[name] for part in parts for name in CAMERA_MASKS.values() if name in part]
    if not masks or not masks[0].shape[-1]:
        return None
    present = torch.stack([mask.flatten(0, -2).any(dim=0) for mask in masks]).any(dim=0)
    present[0] |= not present.any()
    return present.nonzero()[:, 0]


def _longest(masks: Sequence[Tensor]) -> int:
    """Return the index after the last token that any sample has, rounded up to `MULTIPLE` and at most the whole length."""
    valid = torch.stack([mask.flatten(0, -2).any(dim=0) for mask in masks]).any(dim=0)
    end = int(valid.nonzero().max()) + 1 if valid.any() else 1
    return min(-(-end // MULTIPLE) * MULTIPLE, len(valid))
