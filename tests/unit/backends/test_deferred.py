"""Weights computed from the record of a construction on the meta device are those of direct construction, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchbox.backends.deferred import (
    META,
    DeferredWeights,
    allocate,
    deferred_weights,
    materialise_policy,
    take_deferred_weights,
)
from benchbox.errors import UnsupportedError
from benchbox.measure.memory import TensorStorageTracker
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy, find_policies

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
SEED = 7


def defer(build: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredWeights]:
    weights = DeferredWeights(SEED, CPU)
    with weights.recording(), META:
        module = build()
    weights.bind(module)
    return module, weights


def build_directly(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    tensors, wanted = state(actual), state(expected)
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name
        assert (tensor.dtype, tensor.stride(), tensor.requires_grad, type(tensor)) == (
            wanted[name].dtype,
            wanted[name].stride(),
            wanted[name].requires_grad,
            type(wanted[name]),
        )


@pytest.mark.parametrize("name", find_policies())
def test_every_policy_gets_the_weights_of_direct_construction(name: str) -> None:
    """And leaves the random generator where direct construction leaves it."""

    def build() -> nn.Module:
        return build_policy(name, "tiny", Axes())  # type: ignore[return-value]

    expected = build_directly(build)
    generator_state = torch.get_rng_state()
    policy, _ = defer(build)
    assert all(tensor.device == META for tensor in state(policy).values())
    materialise_policy(policy)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert_same(policy, expected)


class Varied(nn.Module):
    """A policy as others may write it: all initialisers, constants, tied and derived tensors, numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated, self.orthogonal, self.sparse = (nn.Linear(6, 8) for _ in range(3))
        nn.init.trunc_normal_(self.truncated.weight, std=0.3)
        nn.init.orthogonal_(tensor=self.orthogonal.weight)
        nn.init.sparse_(self.sparse.weight, 0.5)
        self.convolution = nn.Conv2d(2, 4, 3)
        nn.init.dirac_(self.convolution.weight)
        self.embedding = nn.Embedding(5, 4, padding_idx=2)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scaled = nn.Parameter(torch.randn(3, 4) / 3)
        self.transposed = nn.Parameter(torch.as_tensor([[1.0, 2.0], [3.0, 4.0]]).T, requires_grad=False)
        self.recurrent, self.norm = nn.GRU(3, 4), nn.BatchNorm1d(3)
        with torch.no_grad():
            self.sparse.bias.copy_(self.truncated.bias * 2)
        self.constants: Tensor
        self.register_buffer("constants", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("from_numpy", torch.from_numpy(np.ones(3)))
        self.register_buffer("sums", torch.arange(5).float().cumsum(0)[1:], persistent=False)


def test_a_module_of_any_making_gets_the_weights_of_direct_construction() -> None:
    """Some functions of torch.nn.init do nothing to meta tensors, and `torch.tensor` hides its values from them."""
    module, _ = defer(Varied)
    materialise_policy(module)
    assert_same(module, build_directly(Varied))
    assert isinstance(module, Varied)
    assert module.head.weight is module.embedding.weight


def test_recording_leaves_torch_as_it_was() -> None:
    before = dict(vars(nn.init))
    defer(Varied)
    assert dict(vars(nn.init)) == before


class PartlyReal(nn.Module):
    """Initialises a layer from an orthogonal matrix that it computes on the CPU, and keeps that matrix nowhere."""

    def __init__(self) -> None:
        super().__init__()
        rotation = nn.init.orthogonal_(torch.empty(4, 4, device="cpu"), generator=torch.Generator().manual_seed(0))
        self.scale = nn.Parameter(torch.full((4,), rotation.abs().sum().item()))


def test_a_tensor_that_is_not_on_the_meta_device_is_initialised_at_once() -> None:
    module, _ = defer(PartlyReal)
    materialise_policy(module)
    assert_same(module, build_directly(PartlyReal))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))


def test_tensors_exist_one_at_a_time() -> None:
    _, weights = defer(Layers)
    names: list[str] = []
    with TensorStorageTracker() as tracker:
        weights.materialise(lambda name, _: names.append(name))
    assert names == [f"layers.{layer}.weight" for layer in range(8)]
    assert tracker.peak_bytes == 4 * 64 * 64


def test_what_no_parameter_depends_on_is_not_computed() -> None:
    """Such as the tensors by which the loading of published weights compares shapes."""
    _, weights = defer(Layers)
    with weights.recording():
        torch.empty(64, 1000, device=META).T.add(1.0)
    with TensorStorageTracker() as tracker:
        weights.materialise(lambda *_: None)
    assert tracker.peak_bytes == 4 * 64 * 64


def test_weights_loaded_from_a_file_are_copied_into_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Though they are loaded after the whole construction. The file is mapped."""
    published = {f"layers.{layer}.weight": torch.full((64, 64), float(layer)) for layer in range(7)}
    save_file(published, tmp_path / "w.safetensors")
    module, weights = defer(Layers)
    with weights.recording(), safe_open(tmp_path / "w.safetensors", framework="pt") as file, torch.no_grad():
        parameters = dict(module.named_parameters())
        sources = {name: file.get_tensor(name) for name in published}
        for name, source in sources.items():
            parameters[name].copy_(source)
    drawn = state(build_directly(Layers))["layers.7.weight"]
    expected = sources | {"layers.7.weight": drawn}
    matches = {}

    def compare(name: str, tensor: Tensor) -> None:
        matches[name] = torch.equal(tensor, expected[name])

    with TensorStorageTracker(expected.values()) as tracker:
        weights.materialise(compare)
    assert matches == dict.fromkeys(expected, True)
    assert tracker.peak_bytes == 4 * 64 * 64 * (len(expected) + 1)


def test_a_policy_keeps_its_record_until_it_is_taken() -> None:
    module, weights = defer(Layers)
    assert deferred_weights(module) is weights is take_deferred_weights(module)
    assert deferred_weights(module) is None


def test_values_that_no_operation_shows_are_refused() -> None:
    """Instead of being replaced by whatever is in memory."""
    module = nn.Module()
    module.register_buffer("hidden", torch.empty(3, device=META))
    with pytest.raises(UnsupportedError, match="Module cannot be built on the meta device: hidden is not the result of"):
        defer(lambda: module)


def test_allocated_tensors_stay_tied_across_calls() -> None:
    first, second = (nn.Linear(2, 2, bias=False, device=META) for _ in range(2))
    second.weight = first.weight.requires_grad_(False)
    replacements: dict[Tensor, Tensor] = {}
    allocate([first], CPU, replacements)
    allocate([second], CPU, replacements)
    assert first.weight is second.weight
    assert (first.weight.device, first.weight.requires_grad) == (CPU, False)
