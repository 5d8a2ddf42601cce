"""Loss scales that a script applies by hand: constants that multiply the loss right before its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .tracing import is_capturing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .guard import FailureGuard

# Smaller factors weight a loss; loss scales are powers of two, from 128 on in practice.
_MIN_SCALE = 16.0
# Operations that multiply a loss by a constant or leave its value as it is, and those that reduce the losses of samples to it.
_SCALING = frozenset({"MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0", "CloneBackward0"})
_VIEWS = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"})
_REDUCING = frozenset({"MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"})


class LossScaleWatch:
    """Measures the gradient of a loss before the script multiplied it.

    Constants that autograd saved are not read: activation checkpointing would compute a forward pass to unpack them.

    Args:
        guard: of the measurement, which runs inside the training's backward pass.
    """

    def __init__(self, guard: FailureGuard) -> None:
        self._guard = guard
        self.was_scaled = False

    def watch(self, losses: Tensor | Iterable[Tensor], gradient: Any = None) -> None:
        """Measure in the backward pass that is about to begin. An iterator is left to it.

        Args:
            losses, gradient: arguments of the backward pass. Scripts may pass their scale as the gradient of the loss.
        """
        loss = losses[0] if isinstance(losses, (list, tuple)) and len(losses) == 1 else losses
        if self.was_scaled or type(loss) is not Tensor or loss.numel() != 1:
            return
        if is_capturing():
            return
        last, node = None, loss.grad_fn
        while node is not None and (name := node.name()) in _SCALING | _VIEWS | _REDUCING:
            inputs = [function for function, _ in node.next_functions if function is not None]
            if len(inputs) != 1:  # two factors that are both trained
                break
            last, node = (node if name in _SCALING else last), inputs[0]
        if last is not None:
            last.register_hook(self._measure)
        elif isinstance(gradient, Tensor):
            self._measure([gradient], None)

    def _measure(self, of_inputs: Sequence[Any], _: Any) -> None:
        with self._guard:
            gradients = [gradient for gradient in of_inputs if gradient is not None and gradient.numel()]
            self.was_scaled |= any(gradient.abs().max().item() >= _MIN_SCALE for gradient in gradients)
