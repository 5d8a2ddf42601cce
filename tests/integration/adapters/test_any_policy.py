"""Modules of others through real launches: all backends, recorded as observed, and audited without false alarms."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.audit_corpus.environments import corpus_environment
from tests.support.adapter_runs import RANKS, alarms, failures, run, run_in, set_ups
from tests.support.foreign import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def backends(exhaustive: bool) -> list[str]:
    """Return the backends that run: by default one of each code that wraps modules."""
    return list(RANKS) if exhaustive else ["single", "ddp", "fsdp1_full", "fsdp2", "zero3"]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, backends: list[str], exhaustive: bool) -> list[dict]:
    """Records of the policy `foreign`, which a matrix names by the path of its folder."""
    folder = tmp_path_factory.mktemp("foreign")
    shutil.copytree(FOLDER, folder / "models" / "foreign", ignore=shutil.ignore_patterns("__pycache__"))
    checkpointed = [backend for backend in backends if backend != "zero3"]
    points = [
        *set_ups(checkpointed, checkpointing=True),
        *set_ups(["zero3", "ddp"]),
        *set_ups(["ddp", "fsdp2", "zero3"] if exhaustive else ["fsdp2", "zero3"], size="tiny_reads"),
    ]
    return run(folder, [{"policy": "models/foreign", **point} for point in points])


def test_every_backend_trains_the_module(foreign: list[dict], backends: list[str]) -> None:
    assert failures(foreign) == []
    assert {record["cell"]["backend"] for record in foreign} == set(backends)
    assert {record["observed"]["backend"] for record in foreign} == set(backends)


def test_no_finding_is_a_false_alarm(foreign: list[dict]) -> None:
    assert alarms(foreign) == []


def test_two_ranks_have_the_same_losses_under_every_backend(foreign: list[dict], backends: list[str]) -> None:
    """With and without checkpointing, dropout included. Kernels round differently, and sharded norms sum in another order."""
    losses = {
        (r["cell"]["backend"], r["cell"]["checkpointing"]): r["loss"]
        for r in foreign
        if r["cell"]["world_size"] == 2 and r["cell"]["size"] == "tiny"
    }
    assert len(losses) == 1 + sum(RANKS[backend] == 2 for backend in backends)
    expected = losses["ddp", False]
    for set_up, loss in losses.items():
        assert loss == pytest.approx(expected, rel=2e-3), set_up


def test_the_layers_are_recomputed_where_checkpointing_is_on(foreign: list[dict]) -> None:
    observed = {(r["cell"]["checkpointing"], r["observed"]["checkpointed_modules"]) for r in foreign}
    assert observed == {(True, 3), (False, 0)}


def test_the_layers_are_sharded_one_by_one(foreign: list[dict], backends: list[str]) -> None:
    sharding = {r["cell"]["backend"]: r["observed"]["sharding"] for r in foreign if r["cell"]["size"] == "tiny"}
    assert sharding["fsdp2"].endswith("in 4 units")  # three layers and what is around them
    assert "hsdp" not in backends or sharding["hsdp"].endswith("in 4 units")
    assert sharding["fsdp1_full"].endswith("in 6 units")  # and FSDP1 separates the batch norm, benchbox what is frozen


def test_what_runs_is_recorded_as_observed(foreign: list[dict]) -> None:
    for record in foreign:
        observed = record["observed"]
        assert record["cell"]["attention"] == "native"
        assert observed["attention_kernel"].startswith("sdpa:")
        assert list(observed["attention_sites"]) == ["layers.*.attention"]
        assert observed["unused_parameters"] == ["unused.bias", "unused.weight"]
        assert observed["total_numel"] - observed["trainable_numel"] == 12
        assert record["flops"]["model_flops_per_step"] > 0
        assert record["environment"]["policy_sha256"]


def test_the_record_says_how_the_module_was_built(foreign: list[dict]) -> None:
    ways = {(r["cell"]["size"], r["observed"]["construction"].split(",")[0].split(";")[0]) for r in foreign}
    assert ways == {("tiny", "on the meta device"), ("tiny_reads", "on the cpu")}
    losses = {size: [r["loss"] for r in foreign if r["cell"]["size"] == size] for size in ("tiny", "tiny_reads")}
    assert losses["tiny_reads"][0] == pytest.approx(losses["tiny"][0], rel=0.2)


def test_buffers_keep_their_dtype(foreign: list[dict]) -> None:
    for record in foreign:
        census = record["precision"]["census"]
        buffers = {(entry["dtype"]) for entry in census if entry["kind"] == "buffer"}
        assert buffers == {"float32", "int64", "complex64"}, record["cell"]["backend"]
        assert {entry["dtype"] for entry in census if entry["kind"] == "exp_avg"} == {"float32"}


@pytest.mark.exhaustive
def test_models_of_transformers_train_on_sharding_backends(tmp_path: Path) -> None:
    """A causal language model and a vision-language model; `matrices/any_policy.yaml` has the others."""
    points = [
        *({"policy": "hf:qwen2_5_vl", **point} for point in set_ups(["fsdp2"], checkpointing=True)),
        *({"policy": "hf:gpt2", "attention": "eager", **point} for point in set_ups(["zero3"])),
    ]
    records = run(tmp_path, points)
    assert failures(records) == []
    assert alarms(records) == []
    by_policy = {record["cell"]["policy"]: record["observed"] for record in records}
    assert by_policy["hf:qwen2_5_vl"]["checkpointed_modules"] == 3 + 2  # of text and vision
    assert by_policy["hf:gpt2"]["attention_kernel"] == "eager"


def test_an_adapter_without_its_package_says_which_one_to_install(tmp_path: Path) -> None:
    (record,) = run(tmp_path, [{"policy": "lerobot:act", **set_ups(["single"])[0]}])
    assert record["status"] == "unsupported"
    assert record["error"]["message"] == (
        "policy lerobot: needs the package lerobot, which is not installed; pip install lerobot"
    )


def test_act_of_lerobot_trains_from_its_own_package(tmp_path: Path) -> None:
    """In the environment of the audit corpus, with the packages of lerobot 0.4; benchbox comes by its path."""
    lerobot = corpus_environment("lerobot")
    if not lerobot.is_built:
        pytest.skip(f"lerobot is not installed in {lerobot.folder}: make audit-corpus ONLY='lerobot*' installs it")
    points = [
        *({"policy": "lerobot:act", **point} for point in set_ups(["ddp", "zero2"])),
        *({"policy": "lerobot:act", **point} for point in set_ups(["fsdp2"], checkpointing=True)),
        *({"policy": "lerobot:smolvla", **point} for point in set_ups(["fsdp1_full"])),
        *({"policy": "lerobot:pi0", **point} for point in set_ups(["single"])),
    ]
    *records, refused = sorted(run_in(lerobot, tmp_path, points), key=lambda record: record["status"] == "unsupported")
    assert failures(records) == []
    assert alarms(records) == []
    reasons = {record["cell"]["policy"]: record["observed"]["unused_parameters_reason"] for record in records}
    assert reasons["lerobot:act"] is not None
    assert refused["error"]["message"] == (
        "lerobot:pi0 needs lerobot 0.6: the installed one asks for a patched transformers, which is not on PyPI"
    )
