"""Construction of a session from a cell, and the cells that it refuses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from benchbox.backends.deferred import take_deferred_weights
from benchbox.errors import DataError, UnsupportedError
from benchbox.session import construction
from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from benchbox.spec.cell import Cell, DataSpec
from tests.support.direct_construction import initial_parameters

if TYPE_CHECKING:
    from pathlib import Path

STATISTICS = {"q01": [-1.0] * 7, "q99": [1.0] * 7}


def cell(**changes: object) -> Cell:
    values = {
        "policy": "pi05",
        "size": "tiny",
        "backend": "single",
        "world_size": 1,
        "batch": 1,
        "data": DataSpec(kind="synthetic"),
    }
    return Cell(**(values | changes))  # type: ignore[arg-type]


def test_what_steps_draw_depends_on_the_seed_of_the_cell_alone() -> None:
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(draws))
        seeded = cell(policy="value", seed=seed)
        build_session(seeded, build_cell_policy(seeded), [])
        draws.append(torch.rand(1).item())
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"backend": "zero3", "world_size": 2, "checkpointing": True}, "zero3 refuses activation checkpointing"),
        ({"backend": "hsdp", "world_size": 2}, "hsdp needs at least 4 ranks"),
        ({"world_size": 2}, "single runs on at most 1 rank"),
        ({"backend": "zero2", "world_size": 2, "recipe": "bf16_stochastic"}, "zero2 has no bf16_stochastic recipe"),
        ({"policy": "value", "freeze": "train_expert_only"}, "freeze train_expert_only needs a tower expert, and Value trains"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(changes: dict[str, object], because: str) -> None:
    """Before anything is wrapped, and in the words that `benchbox plan` uses."""
    wanted = cell(**changes)
    with pytest.raises(UnsupportedError, match=because):
        build_session(wanted, build_cell_policy(wanted), [])


@pytest.mark.parametrize("policy", ["hf:paligemma", "hf:qwen3"])
def test_padding_is_left_out_only_of_what_a_policy_declares(policy: str) -> None:
    """The first reads a batch of benchbox without a word about its padding, the second generates its own."""
    wanted = cell(policy=policy, attention="native", padding="longest")
    built = build_cell_policy(wanted)
    message = f"{policy} declares no part of its batches whose padding may be left out .*: write padding: full"
    with pytest.raises(UnsupportedError, match=message):
        open_cell_data(wanted, built, 0)


def test_a_recipe_whose_library_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine that runs it too, which may lack what the one that planned it has."""
    monkeypatch.setitem(sys.modules, "optimi", None)
    wanted = cell(recipe="bf16_kahan")
    with pytest.raises(UnsupportedError, match=r"needs the module optimi, .*: pip install 'benchbox\[lowbit\]'"):
        build_session(wanted, build_cell_policy(wanted), [])


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one GPU would fail deep inside NCCL; instead the rank without one says what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UnsupportedError, match="rank 1 has no GPU of its own: this machine shows 1; lower world_size"):
        build_cell_policy(cell(backend="ddp", world_size=2))


def test_a_rank_makes_its_device_the_current_one_before_the_policy_is_built_and_data_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loader's thread that pins memory takes the current device, which is 0 on every rank until it is set."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set {device}"))
    monkeypatch.setattr(
        construction, "build_policy", lambda *_: calls.append(f"build on {torch.get_default_device()}") or nn.Identity()
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    build_cell_policy(cell(backend="ddp", world_size=2))
    assert calls == ["set cuda:1", "build on meta"]


def initial_state(wanted: Cell) -> dict[str, torch.Tensor]:
    policy = build_cell_policy(wanted)
    assert isinstance(policy, nn.Module)
    weights = take_deferred_weights(policy)
    assert weights is not None
    tensors: dict[str, torch.Tensor] = {}
    weights.materialise(tensors.__setitem__)
    return tensors


def test_a_seed_decides_the_weights() -> None:
    """Every rank and every process gets the same; a different seed gives different ones."""
    weights, same_seed, new_seed = (initial_state(cell(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(weights[name], same_seed[name]) for name in weights)
    assert not all(torch.equal(weights[name], new_seed[name]) for name in weights)


def test_a_session_starts_from_the_weights_that_its_cell_names(tmp_path: Path) -> None:
    """Every parameter is the file's, and those that the file lacks are as the seed made them."""
    wanted = cell(recipe="fp32", weights=str(tmp_path))
    seeded = initial_parameters(wanted)
    lacking = "action_out.weight"
    published = {name: parameter + 1.0 for name, parameter in seeded.items() if name != lacking}
    save_file(published, tmp_path / "model.safetensors")
    session = build_session(wanted, build_cell_policy(wanted), [{"action": STATISTICS}])
    parameters = dict(session.model.named_parameters())
    assert set(parameters) == {*published, lacking}
    assert all(torch.equal(parameters[name], published[name]) for name in published)
    assert torch.equal(parameters[lacking], seeded[lacking])
    assert session.loaded is not None
    assert session.loaded.to_dict() == {"loaded": len(published), "missing": [lacking], "unexpected": [], "fitted": {}}


def test_a_session_without_weights_says_that_none_were_loaded() -> None:
    wanted = cell()
    assert build_session(wanted, build_cell_policy(wanted), [{"action": STATISTICS}]).loaded is None


def test_weights_for_a_policy_that_reads_none_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Linear reads no published weights"):
        build_session(cell(weights="w.safetensors"), nn.Linear(1, 1), [])  # type: ignore[arg-type]


def test_weights_that_went_missing_since_the_plan_are_refused(tmp_path: Path) -> None:
    wanted = cell(weights=str(tmp_path / "w.safetensors"))
    with pytest.raises(DataError, match=r"w.safetensors: there is no such file"):
        build_session(wanted, build_cell_policy(wanted), [])


TRANSPOSED = """\
import benchbox
import torch
from torch import nn

def build(preset, axes):
    down, up = nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False)
    up.weight = nn.Parameter(down.weight.detach().t())
    module = nn.Sequential(down, up)
    return benchbox.adapt(module, loss=lambda output: output.square().mean(), batch=lambda size, seed: torch.ones(size, 4))
"""


def test_a_parameter_that_is_a_view_of_another_is_refused(tmp_path: Path) -> None:
    """Laid out row by row, it would be one of its own."""
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "policy.py").write_text(TRANSPOSED)
    (tmp_path / "tied" / "presets.yaml").write_text("tiny: {}\n")
    tied = cell(policy="tied", attention="native")
    with pytest.raises(UnsupportedError, match=r"^1\.weight is a view of another parameter: "):
        build_session(tied, build_cell_policy(tied, [tmp_path]), [])
