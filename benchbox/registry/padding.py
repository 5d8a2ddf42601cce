"""Sizes of micro-batches as the steps got them, in words, and whether they are those that the padding of a cell asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.launch_record import PartSizes

CAMERAS = "cameras"


def padding_mismatch(requested: str, sizes: Mapping[str, PartSizes]) -> str | None:
    """Return how the sizes of micro-batches contradict the requested padding, or None when they do not.

    Under `longest` every size up to that of the policy's spec is possible: it depends on the samples.
    """
    impossible = {part: size for part, size in sizes.items() if not 0 < size["smallest"] <= size["largest"] <= size["spec"]}
    if impossible:
        return f"observed micro-batches of impossible sizes: {describe_sizes([impossible])}"
    cut = {part: size for part, size in sizes.items() if size["smallest"] < size["spec"]}
    if requested == "full" and cut:
        return f"requested padding full, observed micro-batches that were cut: {describe_sizes([cut])}"
    return None


def describe_sizes(ranks: Sequence[Mapping[str, PartSizes]]) -> str:
    """Return the smallest and the largest size of each part over all ranks, such as `cameras 1 to 3 of 4`."""
    texts = []
    for part, size in ranks[0].items():
        smallest, largest = min(rank[part]["smallest"] for rank in ranks), max(rank[part]["largest"] for rank in ranks)
        span = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
        texts.append(f"{part} {span} of {size['spec']}{'' if part == CAMERAS else ' tokens'}")
    return ", ".join(texts)
