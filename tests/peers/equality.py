"""Equality of the sides of a comparison: hyperparameters and losses, without which their times mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.peers.side import KERNELS_ALONE

if TYPE_CHECKING:
    from collections.abc import Sequence

# Relative, in float32: kernels add in another order, and later steps start from weights that already differ by rounding.
FIRST_LOSS, LATER_LOSSES = 1e-4, 1e-2


class UnequalSidesError(RuntimeError):
    """Sides that do not train the same."""


def check_hyperparameters(sides: Sequence[dict[str, Any]]) -> None:
    """Compare the hyperparameters that the optimizers of all sides have.

    Raises:
        UnequalSidesError: they differ.
    """
    optim = [(side, side["optim"]) for side in sides if "optim" in side]
    for side, values in optim:
        if values != optim[0][1]:
            raise UnequalSidesError(f"{_name(optim[0][0])} trains with {optim[0][1]}, and {_name(side)} with {values}")


def check_losses(sides: Sequence[dict[str, Any]]) -> None:
    """Compare the losses of all steps of all sides, in float32. One that repeats kernels alone takes no steps.

    Raises:
        UnequalSidesError: a side has taken other steps, or has another loss in one of them.
    """
    sides = [side for side in sides if side["name"] != KERNELS_ALONE]
    courses = [[*side["losses"], *(loss for turn in side["turns"] for loss in turn["losses"])] for side in sides]
    for side, course in zip(sides, courses, strict=True):
        if len(course) != len(courses[0]):
            raise UnequalSidesError(f"{_name(side)} took {len(course)} steps, and {_name(sides[0])} {len(courses[0])}")
        for step, (loss, other) in enumerate(zip(course, courses[0], strict=True)):
            tolerance = LATER_LOSSES if step else FIRST_LOSS
            if not abs(loss - other) <= tolerance * abs(other):
                raise UnequalSidesError(
                    f"step {step}: the loss of {_name(side)} is {loss:.6g}, and that of {_name(sides[0])} {other:.6g}"
                )


def _name(side: dict[str, Any]) -> str:
    return f"{side['name']}, {side['variant']}"
