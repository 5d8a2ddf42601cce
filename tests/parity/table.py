"""The parity table: the largest differences between a policy and a peer's, by quantity."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@dataclass(frozen=True)
class ParityRow:
    """The largest difference of one quantity, relative to the largest magnitude of the peer's values."""

    policy: str
    peer: str  # with its version: `lerobot 0.6.2`, or `formulas of VITRA`
    quantity: str
    difference: float
    bound: float
    reason: str = ""  # of a difference that is wanted


class ParityTable:
    """Compares quantities with a peer's, and keeps the differences.

    Args:
        path: JSON Lines file to which rows are appended; None keeps none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def compare(
        self, policy: str, peer: str, quantity: str, ours: Tensor, theirs: Tensor, *, bound: float = 1e-5, reason: str = ""
    ) -> None:
        """Assert that two tensors of one shape differ by at most `bound`, relative to the peer's largest magnitude.

        With a reason they must also differ by more than 1e-5, or the reason is outdated.
        """
        assert ours.shape == theirs.shape, (
            f"{quantity} of {policy}: shape {tuple(ours.shape)} against {tuple(theirs.shape)} of {peer}"
        )
        assert theirs.numel(), f"{quantity} of {policy}: nothing to compare"
        ours, theirs = ours.detach().double(), theirs.detach().double()
        scale = float(theirs.abs().max()) or 1.0
        difference = float((ours - theirs).abs().max()) / scale
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(ParityRow(policy, peer, quantity, difference, bound, reason))) + "\n")
        assert difference <= bound, f"{quantity} of {policy} differs by {difference:.2g} of its magnitude from {peer}"
        assert torch.isfinite(ours).all(), f"{quantity} of {policy} is not finite"
        assert not reason or difference > 1e-5, f"{quantity} of {policy} agrees with {peer}, which was not expected: {reason}"


def read_rows(path: Path) -> list[ParityRow]:
    """Return the rows of a file."""
    return [ParityRow(**json.loads(line)) for line in path.read_text().splitlines()]
