"""Clippings of gradients that wait for the step of the tensors they clipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(eq=False)
class Clip:
    """One clipping by norm. A loss scaler that unscales the gradients only afterwards divides the limit by its scale, too."""

    norm: Any  # that it returned: a tensor, which is not read before it is needed
    max_norm: float
    scale: float | None = None  # by which the gradients were divided after the clipping


class PendingClips:
    """The latest clipping of each tensor since its last step."""

    def __init__(self) -> None:
        self._latest: dict[int, Clip] = {}  # by the id of the clipped tensor

    def __bool__(self) -> bool:
        return bool(self._latest)

    def __contains__(self, tensor_id: int) -> bool:
        return tensor_id in self._latest

    def add(self, clip: Clip, tensor_ids: Iterable[int]) -> None:
        """Add a clipping of these tensors, which were not stepped since."""
        self._latest.update(dict.fromkeys(tensor_ids, clip))

    def of(self, tensor_ids: Iterable[int]) -> list[Clip]:
        """Return the clippings that wait for these tensors."""
        return list(dict.fromkeys(self._latest[tensor_id] for tensor_id in tensor_ids if tensor_id in self._latest))

    def pending(self) -> dict[Clip, set[int]]:
        """Return all clippings, each with the ids of the tensors for which it waits."""
        clips: dict[Clip, set[int]] = {}
        for tensor_id, clip in self._latest.items():
            clips.setdefault(clip, set()).add(tensor_id)
        return clips

    def pop(self, tensor_ids: Iterable[int]) -> list[Clip]:
        """Remove and return the clippings that wait for these tensors, which are about to be stepped or were stepped."""
        clips = (self._latest.pop(tensor_id, None) for tensor_id in tensor_ids)
        return list(dict.fromkeys(clip for clip in clips if clip is not None))

    def pop_all(self) -> list[Clip]:
        """Remove and return all clippings."""
        return self.pop(list(self._latest))
