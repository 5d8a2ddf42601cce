"""lerobot's vision-language-action policies through real launches, from the package of lerobot 0.6 (`make parity` installs it).

All nine backends occur; `matrices/lerobot.yaml` runs every policy on every one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.parity.lerobot import ENVIRONMENT, requires_lerobot
from tests.support.adapter_runs import RANKS, alarms, failures, run_in, set_ups

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.ranks, requires_lerobot]

Records = dict[tuple[str, str], dict]

# Two ranks, and the same samples: their losses are comparable. The first of each policy is not sharded.
BACKENDS = {
    "pi0": ["ddp", "fsdp1_full", "zero3"],
    "pi05": ["ddp", "fsdp2", "zero1"],
    "pi0_fast": ["ddp", "fsdp1_grad_op", "zero2"],
    "smolvla": ["ddp", "fsdp2", "zero3"],
}
# Parts that run again in the backward pass: MLPs of backbone and expert, or whole layers of the backbone, and layers of the
# vision tower. No action of pi0 and SmolVLA reads the last MLP of the backbone, and SmolVLA's vision tower is frozen.
CHECKPOINTED = {("pi0", "fsdp1_full"): 2 + 3 + 2, ("pi0_fast", "fsdp1_grad_op"): 3 + 2, ("smolvla", "fsdp2"): 3 + 4}
# pi0 and pi05: two output heads without a text to score, and of the backbone's last layer what no action reads
UNUSED = {"pi0": 8, "pi05": 8, "pi0_fast": 0, "smolvla": 0}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    points = [
        {"policy": f"lerobot:{policy}", **point, "checkpointing": (policy, point["backend"]) in CHECKPOINTED}
        for policy, backends in BACKENDS.items()
        for point in set_ups(backends)
    ]
    points += [{"policy": "lerobot:smolvla", **point} for point in set_ups(["single"])]
    points += [{"policy": "lerobot:pi05", **point} for point in set_ups(["hsdp"])]
    points += [{"policy": "lerobot:act", "recipe": "fp32", **point} for point in set_ups(["ddp", "zero3"])]
    launched = run_in(ENVIRONMENT, tmp_path_factory.mktemp("lerobot"), points, data="sample")
    return {(record["cell"]["policy"].removeprefix("lerobot:"), record["cell"]["backend"]): record for record in launched}


def test_every_policy_trains_and_every_backend_occurs(records: Records) -> None:
    assert failures(list(records.values())) == []
    assert {backend for _, backend in records} == RANKS.keys()
    for record in records.values():
        assert record["loss"][0] > 0
        assert all(norm > 0 for norm in record["grad_norm"])


def test_no_finding_is_a_false_alarm(records: Records) -> None:
    assert alarms(list(records.values())) == []


@pytest.mark.parametrize("policy", BACKENDS)
def test_two_ranks_have_the_same_losses_under_every_backend(records: Records, policy: str) -> None:
    """Noise and time come with the batch. Kernels round differently, and sharded norms sum in another order."""
    expected, *others = (records[policy, backend]["loss"] for backend in BACKENDS[policy])
    for losses in others:
        assert losses == pytest.approx(expected, rel=2e-3)


def test_zero_3_changes_the_loss_of_act_by_its_rounding_alone(records: Records) -> None:
    """In float32, where DeepSpeed's linear function rounds nothing, the losses are equal."""
    losses = [records["act", backend]["loss"] for backend in ("ddp", "zero3")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_policies_are_built_on_the_meta_device_and_sharded_inside_their_layers(records: Records) -> None:
    for (policy, _), record in records.items():
        if policy != "act":
            assert record["observed"]["construction"].startswith("on the meta device"), policy
    assert records["pi05", "fsdp2"]["observed"]["sharding"].endswith(f"in {3 + 3 + 2 + 1 + 1} units")  # and what is frozen
    assert records["smolvla", "fsdp2"]["observed"]["sharding"].endswith(f"in {4 + 4 + 2 + 2} units")


def test_the_checkpointed_parts_are_counted(records: Records) -> None:
    counts = {key: record["observed"]["checkpointed_modules"] for key, record in records.items()}
    assert {key: count for key, count in counts.items() if count} == CHECKPOINTED


def test_a_policy_without_a_package_that_it_needs_says_so(tmp_path: Path) -> None:
    (record,) = run_in(ENVIRONMENT, tmp_path, [{"policy": "lerobot:diffusion", **set_ups(["single"])[0]}])
    assert record["status"] == "unsupported"
    expected = (
        "policy lerobot:diffusion: 'diffusers' is required but not installed. Install it with: pip install 'lerobot[diffusion]'"
    )
    assert record["error"]["message"].startswith(expected)


def test_what_the_loss_does_not_depend_on_is_found_and_frozen(records: Records) -> None:
    for policy, count in UNUSED.items():
        observed = records[policy, "ddp"]["observed"]
        if observed["unused_parameters_reason"] is None:
            assert len(observed["unused_parameters"]) == count, policy
    frozen = records["pi0", "ddp"]["observed"]["unused_parameters"]
    assert "model.paligemma_with_expert.gemma_expert.lm_head.weight" in frozen
    smolvla = records["smolvla", "ddp"]["observed"]
    assert smolvla["trainable_numel"] < smolvla["total_numel"] / 2, "lerobot freezes the vision-language model"
