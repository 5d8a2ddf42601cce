"""Sizes of the micro-batches that the steps of a rank got."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.registry.contracts import CAMERA_DIMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.registry.launch_record import PartSizes

_NO_SPEC = "the policy generates its batches, and no spec says how large they are"
_NO_PARTS = "the spec of the policy asks for no cameras and no texts"


class SizedBatches:
    """Iterator over micro-batches that keeps the sizes of their parts. It reads shapes, which are on the host.

    Args:
        spec: of the policy; None if it generates its batches.
    """

    def __init__(self, batches: Iterable[Batch], spec: BatchSpec | None) -> None:
        self._batches = iter(batches)
        self._spec = spec
        self._spec_sizes = {} if spec is None else spec.part_sizes
        self._dims = [
            ("images", CAMERA_DIMS["images"]) if part == "cameras" else (f"{part}_tokens", -1) for part in self._spec_sizes
        ]
        self._sizes: set[tuple[int, ...]] = set()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._sizes.add(tuple(batch[name].shape[dim] for name, dim in self._dims))
        return batch

    def result(self) -> tuple[dict[str, PartSizes] | None, str | None]:
        """Return the smallest and the largest size of each part, or None and the reason."""
        if not self._spec_sizes:
            return None, _NO_SPEC if self._spec is None else _NO_PARTS
        if not self._sizes:
            return None, "no step was measured"
        columns = zip(self._spec_sizes.items(), zip(*self._sizes, strict=True), strict=True)
        return {part: {"smallest": min(sizes), "largest": max(sizes), "spec": spec} for (part, spec), sizes in columns}, None
