"""The dispatch mode that shows operations to listeners."""

from __future__ import annotations

from typing import Any

import torch

from benchbox.observer.hooks.dispatch import OperationDispatchMode, operation_name


class Listener:
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.names.append(operation_name(operation))


class ListenerOfProducts(Listener):
    @staticmethod
    def is_relevant(operation: Any) -> bool:
        return operation_name(operation) == "mm"


def test_a_listener_receives_every_operation_or_those_that_it_calls_relevant() -> None:
    everything, products = Listener(), ListenerOfProducts()
    with OperationDispatchMode(everything, products):
        for _ in range(2):
            torch.ones(2, 2) @ torch.ones(2, 2) + 1
    assert everything.names == ["ones", "ones", "mm", "add"] * 2
    assert products.names == ["mm", "mm"]
