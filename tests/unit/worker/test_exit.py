"""The end of a rank."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.worker.rank import _skip_torch_finalizers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Owner:
    """An object that can be referred to weakly."""


@pytest.fixture
def finalizers_as_before() -> Iterator[None]:
    runs_at_exit = {finalizer: finalizer.atexit for finalizer in weakref.finalize._registry}
    yield
    for finalizer, atexit in runs_at_exit.items():
        finalizer.atexit = atexit


@pytest.mark.usefixtures("finalizers_as_before")
def test_a_rank_keeps_the_operators_that_torch_registered_and_finalizes_all_else() -> None:
    owner, library = Owner(), torch.library.Library("benchbox_tests", "DEF")
    ours = weakref.finalize(owner, print)
    operators = [finalizer for finalizer in weakref.finalize._registry if finalizer.peek()[1].__module__ == "torch.library"]
    assert len(operators) > 100, "those of torch and of the library above"
    _skip_torch_finalizers()
    assert ours.atexit
    assert not any(finalizer.atexit for finalizer in operators)
    ours.detach()
    library._destroy()
