"""A policy is compiled as its cell says, in all variants of its code, or refused with the mode to write instead."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo import config, utils

from benchbox.errors import UnsupportedError
from benchbox.measure.compilation import CompilationWatch
from benchbox.measure.phases import ProgressTracker
from benchbox.session.compilation import compile_policy

if TYPE_CHECKING:
    from collections.abc import Iterator


class Named(nn.Module):
    """A policy of which every name is a variant of the code, and without layers."""

    def forward(self, value: torch.Tensor, name: str) -> torch.Tensor:
        return value + len(name)

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return ()


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's own limit, and a compiler that takes no time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with config.patch(recompile_limit=8):
        torch.compiler.reset()
        utils.counters.clear()
        utils.clear_compilation_metrics()
        yield
    torch.compiler.reset()
    utils.counters.clear()  # the observer asks this process whether it has compiled anything


def test_more_variants_of_a_function_are_compiled_than_torch_allows_by_itself() -> None:
    policy: Any = Named()
    compile_policy(policy, "model")
    watch = CompilationWatch(ProgressTracker("warmup"), "model")
    with watch:
        for length in range(12):
            assert policy(torch.zeros(1), "a" * length).item() == length
    record = watch.record()
    assert record is not None
    assert record["graphs"] == 12
    assert record["limits_reached"] == []


def test_the_limit_of_a_policy_that_is_not_compiled_is_torchs() -> None:
    policy: Any = Named()
    compile_policy(policy, "off")
    assert config.recompile_limit == 8


def test_a_policy_of_which_no_layers_repeat_is_not_compiled_by_layers() -> None:
    policy: Any = Named()
    with pytest.raises(UnsupportedError, match="no layers of Named repeat: write compile: model"):
        compile_policy(policy, "blocks")
