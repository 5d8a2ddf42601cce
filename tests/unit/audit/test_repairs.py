"""Repairs name what the user of the recognised library can change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.repairs import MASTERS, MASTERS_BY_LIBRARY, select_repair
from benchbox.audit.rules import rules
from benchbox.observer.facts import Autocast, Contract, RankFacts, Setup, SteppedTensor

TENSOR = SteppedTensor(
    name="weight", optimizer="AdamW", dtype="bfloat16", device="cpu", shape=(4,), elements=4, live=True, live_dtype="bfloat16"
)


def facts(*libraries: str, backend: str = "single", source: str = "command") -> RankFacts:
    setup = Setup(backend=backend, model_class="Net", sharding=None)
    return RankFacts(rank=0, world_size=1, source=source, stepped=(TENSOR,), libraries=libraries, setup=setup)


@pytest.mark.parametrize(
    ("requested", "active", "words"),
    [
        ("float32", True, "leave autocast off"),
        ("float32", False, "remove the casts of parameters and inputs"),
        ("float16", False, "enter autocast"),
    ],
)
def test_the_repair_of_a_dtype_that_was_not_requested_leads_to_the_one_that_was(requested, active, words):
    contract = Contract(source="a recipe", compute=requested)
    seen = replace(facts(), contract=contract, products={"bfloat16": 44}, autocast=Autocast(active=active, dtype="bfloat16"))
    (finding,) = [finding for finding in judge([seen]).findings if finding.code == "BXP601"]
    assert words in finding.repair
    assert finding.evidence["requested"] == f"{requested}, by a recipe"


@pytest.mark.parametrize(
    ("libraries", "backend", "words"),
    [
        ((), "single", "torch.autocast"),
        ((), "fsdp2", "MixedPrecisionPolicy"),
        (("accelerate",), "fsdp2", 'Accelerator(mixed_precision="bf16")'),
        (("deepspeed", "accelerate"), "zero2", "DeepSpeed config"),
        (("accelerate", "transformers"), "ddp", "TrainingArguments"),
        (("accelerate", "transformers"), "fsdp1_full", "TrainingArguments"),
        (("lightning",), "fsdp1_full", 'precision="bf16-mixed"'),
        (("accelerate", "lerobot"), "single", "accelerate launch --mixed_precision=bf16"),
    ],
)
def test_the_repair_is_that_of_the_library_that_drives_the_others(libraries, backend, words):
    (finding,) = [finding for finding in judge([facts(*libraries, backend=backend)]).findings if finding.code == "BXP101"]
    assert words in finding.repair
    assert "tune the learning rate again" in finding.repair


@pytest.mark.parametrize("source", ["session", "checkpoint"])
def test_sessions_and_checkpoints_get_the_recipes_of_benchbox(source):
    (finding,) = [finding for finding in judge([facts(source=source)]).findings if finding.code == "BXP101"]
    assert finding.repair.startswith(MASTERS)


def test_a_library_without_a_repair_of_its_own_gets_that_of_what_it_drives():
    assert select_repair({"fsdp": "shard", "torch": "cast"}, [facts("torchtune", backend="hsdp")]) == "shard"
    assert select_repair({}, [facts("torchtune")]) is None


def test_repairs_are_for_libraries_that_can_be_recognised():
    known = MASTERS_BY_LIBRARY.keys()
    assert {library for rule in rules().values() for library in rule.repairs} <= known
