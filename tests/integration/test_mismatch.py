"""A cell that is not what it was asked to be fails, whatever speed it reached."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.audit.record import facts_file
from benchbox.backends.observe import Observed
from benchbox.errors import MismatchError
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.observer.facts import SteppedTensor
from benchbox.registry.backends import BUILT_IN_BACKENDS
from benchbox.spec.cell import MeasureSpec
from benchbox.worker.expected import check_backend, check_step
from tests.support.ranks import tiny_cell
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.spec.cell import Cell


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["fsdp1_full", "fsdp2", "zero2", "zero3"])
def test_a_set_up_that_silently_became_ddp_is_a_mismatch(backend: str, tmp_path: Path) -> None:
    """accelerate drops the plugin and runs DDP, at a speed of its own; the record says mismatch and names both."""
    launcher = ForkServerLauncher(worker_module="tests.integration.trapped_worker")
    measure = MeasureSpec(warmup_steps=1, steps=2, launches=1)
    record = launch_cell(tiny_cell(backend=backend), measure, launch=1, folder=tmp_path, launcher=launcher)
    launcher.close()
    assert record["status"] == "mismatch", record["error"]
    assert record["error"]["type"] == "MismatchError"
    assert f"requested backend {backend}, observed ddp" in record["error"]["message"]
    assert record["throughput"] is None


@pytest.mark.ranks
@pytest.mark.parametrize("backend", in_tiers(["single", "ddp"], "ddp".__eq__))
def test_mixed_precision_that_the_shell_asks_of_accelerate_does_not_reach_the_ranks(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass would run under accelerate's autocast, in a cell whose name says float32."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    cell = tiny_cell(backend=backend, world_size=1 if backend == "single" else 2, recipe="fp32")
    record = launch_here(cell, tmp_path)
    assert record["status"] == "ok", record["error"]
    facts = json.loads((tmp_path / facts_file(0)).read_text())
    assert facts["products"].keys() == {"float32"}


@pytest.mark.ranks
def test_settings_of_fsdp_that_the_shell_has_for_accelerate_do_not_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    record = launch_here(tiny_cell(backend="fsdp2"), tmp_path)
    assert record["status"] == "ok", record["error"]
    assert record["observed"]["settings"]["offload_policy"] == "OffloadPolicy"


def launch_here(cell: Cell, folder: Path) -> LaunchRecord:
    launcher = ForkServerLauncher()
    measure = MeasureSpec(warmup_steps=1, steps=2, launches=1)
    record = launch_cell(cell, measure, launch=1, folder=folder, launcher=launcher)
    launcher.close()
    return record


def test_products_are_not_judged_where_compiled_code_hides_most_of_them() -> None:
    products = {"float32": 2}
    cell = tiny_cell(recipe="bf16_master", compile="blocks")
    check_step(cell, kernel=None, checkpointed=None, products=products, stepped=stepped("float32"))
    with pytest.raises(MismatchError, match="observed matrix products: 2 in float32"):
        check_step(replace(cell, compile="off"), kernel=None, checkpointed=None, products=products, stepped=[])


def observed(**changes: Any) -> Observed:
    values = {
        "backend": "fsdp2",
        "model_class": "FSDPPi05",
        "optimizer_chain": ["AcceleratedOptimizer", "AdamW"],
        "sharding": "S(0) on mesh (2,)",
        "shard_numel": 50,
        "trainable_numel": 100,
        "total_numel": 120,
        "world_size": 2,
        "device": "cpu",
    }
    return Observed(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "hsdp"}, "requested backend fsdp2, observed hsdp"),
        ({"world_size": 1}, "requested 2 ranks, observed 1"),
        ({"shard_numel": 100}, "nothing is sharded"),
    ],
)
def test_what_is_observed_before_the_first_step_decides(changes: dict[str, Any], message: str) -> None:
    """Another backend, another number of ranks, or shards as large as the whole are refused; the real thing passes."""
    cell = tiny_cell(backend="fsdp2")
    check_backend(cell, observed())
    with pytest.raises(MismatchError, match=message):
        check_backend(cell, observed(**changes))


@pytest.mark.parametrize("backend", [name for name in BUILT_IN_BACKENDS if name not in ("single", "ddp")])
def test_every_backend_that_shards_is_refused_where_nothing_is_sharded(backend: str) -> None:
    """Only one process and DDP step all that trains on every rank."""
    cell = tiny_cell(backend=backend)
    check_backend(cell, observed(backend=backend))
    with pytest.raises(MismatchError, match=f"{backend} steps 100 elements on this rank and the policy trains 100"):
        check_backend(cell, observed(backend=backend, shard_numel=100))


@pytest.mark.parametrize("backend", ["single", "ddp"])
def test_a_backend_that_replicates_may_step_all_that_trains(backend: str) -> None:
    check_backend(tiny_cell(backend=backend), observed(backend=backend, shard_numel=100))


def test_a_cell_that_freezes_and_trains_everything_is_refused() -> None:
    """Counted on the wrapped model; what a policy itself keeps fixed is no matter of the cell's."""
    check_backend(tiny_cell(backend="fsdp2", freeze="freeze_vision"), observed())
    check_backend(tiny_cell(backend="fsdp2"), observed(total_numel=100))
    with pytest.raises(MismatchError, match="requested freeze freeze_vision, observed that all 100 elements train"):
        check_backend(tiny_cell(backend="fsdp2", freeze="freeze_vision"), observed(total_numel=100))


def stepped(dtype: str) -> list[SteppedTensor]:
    return [SteppedTensor(name="w", optimizer="AdamW", dtype=dtype, device="cpu", shape=(4,), elements=4, live=True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "eager"}, "requested sdpa attention, observed eager"),
        ({"checkpointed": 0}, "requested checkpointing on, observed 0 modules"),
        ({"stepped": stepped("bfloat16")}, "recipe bf16_master steps float32 tensors, observed bfloat16"),
        (
            {"products": {"bfloat16": 4, "float32": 60}},
            "computes in bfloat16, observed matrix products: 4 in bfloat16, 60 in float32",
        ),
    ],
)
def test_what_is_observed_in_a_step_decides(changes: dict[str, Any], message: str) -> None:
    """A kernel, recomputation or dtype other than requested is refused; the real thing passes."""
    cell = tiny_cell(attention="sdpa", checkpointing=True, recipe="bf16_master")
    observations: dict[str, Any] = {"kernel": "sdpa:flash_cpu", "checkpointed": 5, "stepped": stepped("float32")}
    observations["products"] = {"bfloat16": 4, "float32": 6}
    check_step(cell, **observations)
    with pytest.raises(MismatchError, match=message):
        check_step(cell, **(observations | changes))


@pytest.mark.parametrize("kernel", ["eager", "sdpa:math", "sdpa:flash_cpu+eager"])
def test_a_policy_that_cannot_switch_its_attention_is_never_a_mismatch(kernel: str) -> None:
    check_step(tiny_cell(attention="native"), kernel=kernel, checkpointed=0, products={}, stepped=stepped("float32"))
    with pytest.raises(MismatchError, match="observed 3 modules run twice, so the policy recomputes by itself"):
        check_step(tiny_cell(attention="native"), kernel=kernel, checkpointed=3, products={}, stepped=stepped("float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_recipe_that_leaves_masters_to_the_backend_is_never_a_mismatch(dtype: str) -> None:
    """Whatever is stepped then is what was asked for; whether it is right, the audit says."""
    check_step(tiny_cell(recipe="bf16_naive"), kernel=None, checkpointed=None, products={}, stepped=stepped(dtype))
