"""Tests of reading and judging checkpoints of two ranks, written by the sharding libraries themselves."""

from __future__ import annotations

import shutil

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.selection import Selection
from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import DataError
from tests.support.ranks import RANK_SCRIPTS, run_ranks

pytestmark = pytest.mark.ranks
ELEMENTS = {"0.weight": 256, "0.bias": 16, "1.weight": 128, "1.bias": 8}
ZERO = ["zero1", "zero2", "zero3"]
FSDP = ["fsdp1", "fsdp2", "fsdp2-flat", "accelerate", "accelerate-by-rank"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "accelerate-by-rank").mkdir()
    run_ranks(2, RANK_SCRIPTS / "checkpoints.py", str(folder))
    return folder


def stepped(ranks):
    return [tensor for facts in ranks for tensor in facts.stepped]


def elements(ranks):
    """Return the number of stepped elements by name, over all ranks."""
    totals = dict.fromkeys((tensor.name for tensor in stepped(ranks)), 0)
    for tensor in stepped(ranks):
        totals[tensor.name] += tensor.elements
    return totals


def fired(ranks):
    return {finding.code for finding in judge(ranks, Selection()).findings}


@pytest.mark.parametrize("name", ZERO)
def test_zero_steps_float32_masters_of_bfloat16_parameters(saved, name):
    ranks = read_checkpoint(saved / name)
    assert [(facts.rank, facts.world_size) for facts in ranks] == [(0, 2), (1, 2)]
    assert elements(ranks) == ELEMENTS
    assert {(tensor.dtype, tensor.live, tensor.live_dtype) for tensor in stepped(ranks)} == {("float32", False, "bfloat16")}
    assert {tensor.step_count for tensor in stepped(ranks)} == {3.0}
    assert {(tensor.live_ndim, tensor.weight_decay) for tensor in stepped(ranks)} == {(2, 0.1), (1, 0.0)}
    assert all(tensor.numbers.bf16_valued["weight"] < 0.2 for tensor in stepped(ranks))
    assert {buffer.name for facts in ranks for buffer in facts.buffers} == {"inv_freq"}
    assert fired(ranks) == set()
    assert {"BXP101", "BXP201", "BXP501", "BXP502"} <= set(judge(ranks, Selection()).clean)


@pytest.mark.parametrize(("name", "live_dtype"), [("zero0", None), ("zero0-masters", "bfloat16"), ("universal", "bfloat16")])
def test_deepspeeds_checkpoints_without_partitions_are_those_of_one_rank(saved, name, live_dtype):
    (facts,) = read_checkpoint(saved / name)
    assert {tensor.name: tensor.elements for tensor in facts.stepped} == ELEMENTS
    assert {(tensor.dtype, tensor.live) for tensor in facts.stepped} == {("float32", live_dtype is None)}
    assert {tensor.live_dtype for tensor in facts.stepped} == {live_dtype or "float32"}
    assert {tensor.numbers.live_differs for tensor in facts.stepped} == {None if live_dtype is None else 0.0}
    assert all(tensor.state["exp_avg"] == "float32" and tensor.step_count >= 3 for tensor in facts.stepped)
    assert [buffer.name for buffer in facts.buffers] == ["inv_freq"]
    assert fired([facts]) == set()


def test_stages_of_a_pipeline_are_ranks_with_their_own_layers(saved):
    ranks = read_checkpoint(saved / "pipeline")
    assert [{tensor.name for tensor in facts.stepped} for facts in ranks] == [{"0.weight", "0.bias"}, {"1.weight", "1.bias"}]
    assert elements(ranks) == ELEMENTS
    assert {(tensor.dtype, tensor.live_dtype, tensor.numbers.live_differs) for tensor in stepped(ranks)} == {
        ("float32", "bfloat16", 0.0)
    }
    assert fired(ranks) == set()


def test_a_head_that_no_optimizer_of_a_checkpoint_holds_is_a_warning_and_frozen_and_tied_weights_are_not(saved):
    (finding,) = judge(read_checkpoint(saved / "zero2-no-head")).findings
    assert (finding.code, finding.severity, finding.evidence["names"]) == ("BXP404", "warning", ["head.weight"])
    assert finding.title == "the checkpoint has trainable parameters that no optimizer holds"
    assert fired(read_checkpoint(saved / "zero2-head")) == set()


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zeros_live_weights_are_its_rounded_masters_element_by_element(saved, name):
    """A wrong layout of the partitions would make them differ."""
    ranks = read_checkpoint(saved / name)
    assert {tensor.numbers.live_differs for tensor in stepped(ranks)} == {0.0}
    assert any(len({tensor.name for tensor in facts.stepped}) > 2 for facts in ranks)
    stale = read_checkpoint(saved / f"{name}-stale")
    differ = {(tensor.name, tensor.numbers.live_differs) for tensor in stepped(stale) if tensor.numbers.live_differs}
    assert {name for name, _ in differ} == {"0.weight"}
    assert fired(stale) == {"BXP104"}


def test_zero3_has_no_live_weights_to_compare_with(saved):
    ranks = read_checkpoint(saved / "zero3")
    assert {tensor.numbers.live_differs for tensor in stepped(ranks)} == {None}
    judgement = judge(ranks, Selection())
    assert "BXP104" in judgement.not_judged


@pytest.mark.parametrize("name", ZERO)
def test_masters_that_were_derived_again_are_bfloat16_valued(saved, name):
    ranks = read_checkpoint(saved / f"{name}-rederived")
    assert {tensor.numbers.bf16_valued["weight"] for tensor in stepped(ranks)} == {1.0}
    assert fired(ranks) == {"BXP501"}


@pytest.mark.parametrize("name", ZERO)
def test_moments_that_went_through_bfloat16_are_recognised_by_their_values(saved, name):
    ranks = read_checkpoint(saved / f"{name}-moments")
    assert {tensor.numbers.bf16_valued["exp_avg_sq"] for tensor in stepped(ranks)} == {1.0}
    assert {tensor.state["exp_avg_sq"] for tensor in stepped(ranks)} == {"float32"}
    assert "BXP502" in fired(ranks)
    assert "BXP501" not in fired(ranks)


def test_zero_with_bfloat16_masters_and_state_is_no_better_than_without(saved):
    ranks = read_checkpoint(saved / "zero2-pure")
    assert {(tensor.dtype, tensor.state["exp_avg_sq"]) for tensor in stepped(ranks)} == {("bfloat16", "bfloat16")}
    assert all(tensor.numbers.second_moment_stalled > 0.9 for tensor in stepped(ranks))
    assert {"BXP101", "BXP201"} <= fired(ranks)


@pytest.mark.parametrize("name", FSDP)
def test_fsdps_shards_are_read_for_the_rank_that_wrote_them(saved, name):
    ranks = read_checkpoint(saved / name)
    assert [(facts.rank, facts.world_size) for facts in ranks] == [(0, 2), (1, 2)]
    assert elements(ranks) == ELEMENTS
    for facts in ranks:
        assert {tensor.elements for tensor in facts.stepped} == {count // 2 for count in ELEMENTS.values()}
    assert {(tensor.dtype, tensor.live, tensor.step_count, tensor.lr) for tensor in stepped(ranks)} == {
        ("float32", True, 3.0, 1e-3)
    }
    assert {(tensor.name, tensor.live_ndim) for tensor in stepped(ranks)} == {
        (name, 2 if "weight" in name else 1) for name in ELEMENTS
    }
    assert all(tensor.numbers.bf16_valued["weight"] < 0.2 for tensor in stepped(ranks))
    assert any(buffer.name == "inv_freq" for facts in ranks for buffer in facts.buffers)
    assert fired(ranks) == set()


def test_shards_of_weights_that_were_rounded_when_they_were_saved_have_the_shape_of_their_moments(saved):
    ranks = read_checkpoint(saved / "fsdp2-copies")
    assert {tensor.dtype for tensor in stepped(ranks)} == {"unknown"}
    assert elements(ranks) == ELEMENTS
    assert fired(ranks) == {"BXP602"}, "the buffer of rotary frequencies was rounded, too"


def test_a_file_of_one_ranks_dtensors_holds_its_shard(saved):
    (facts,) = read_checkpoint(saved / "fsdp2-rank1.pt")
    assert {tensor.name: tensor.elements for tensor in facts.stepped} == {name: count // 2 for name, count in ELEMENTS.items()}


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_fsdp_weights_and_moments_that_were_rounded_or_never_float32_are_found(saved, name):
    rounded = read_checkpoint(saved / f"{name}-rounded")
    shares = [tensor.numbers.bf16_valued for tensor in stepped(rounded)]
    assert all(share["weight"] == share["exp_avg_sq"] == 1.0 > share["exp_avg"] for share in shares)
    assert fired(rounded) == {"BXP501", "BXP502"}
    pure = read_checkpoint(saved / f"{name}-pure")
    assert {(tensor.dtype, tensor.state["exp_avg_sq"]) for tensor in stepped(pure)} == {("bfloat16", "bfloat16")}
    assert {"BXP101", "BXP201"} <= fired(pure)


@pytest.mark.parametrize(("name", "file"), [("zero2", "*rank_1*optim_states.pt"), ("fsdp2", "__1_0.distcp")])
def test_a_missing_rank_is_named(saved, tmp_path, name, file):
    shutil.copytree(saved / name, tmp_path / name)
    next((tmp_path / name).rglob(file)).unlink()
    with pytest.raises(DataError, match="missing"):
        read_checkpoint(tmp_path / name)
