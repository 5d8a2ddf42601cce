"""Memory that weights and optimizer state of CPU ranks take at least, and the machine that has less."""

from __future__ import annotations

from typing import Any

import pytest

from benchbox.errors import UnsupportedError
from benchbox.session import host_memory
from benchbox.session.build import build_cell_policy
from benchbox.session.host_memory import check_host_memory, rank_bytes
from benchbox.spec.optim import OptimSpec
from tests.support.ranks import tiny_cell


@pytest.mark.parametrize(
    ("changes", "bytes_of_parameter"),
    [
        ({"backend": "ddp", "recipe": "fp32"}, 4 + 8),
        ({"backend": "fsdp2", "recipe": "fp32"}, (4 + 8) / 2),
        ({"backend": "zero1", "recipe": "bf16_master"}, (4 + 8) / 2),
        ({"backend": "ddp", "recipe": "bf16_pure"}, 2 + 4),
        ({"backend": "ddp", "recipe": "bf16_naive"}, 2 + 4),
        ({"backend": "ddp", "recipe": "fp32", "freeze": "freeze_vision"}, 4),
        ({"backend": "ddp", "recipe": "fp32", "optim": OptimSpec(freeze_backbone_steps=1)}, 4),
    ],
)
def test_weights_and_both_moments_count_and_what_a_backend_shards_counts_once(
    changes: dict[str, Any], bytes_of_parameter: float
) -> None:
    cell = tiny_cell(**changes)
    policy: Any = build_cell_policy(cell)
    assert rank_bytes(cell, policy) == bytes_of_parameter * sum(parameter.numel() for parameter in policy.parameters())


def test_a_machine_with_less_memory_refuses_and_one_with_as_much_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = tiny_cell()
    policy = build_cell_policy(cell)
    needed = round(2 * rank_bytes(cell, policy))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(host_memory, "usable_memory_bytes", lambda: needed)
    check_host_memory(cell, policy)
    monkeypatch.setattr(host_memory, "usable_memory_bytes", lambda: needed - 1)
    with pytest.raises(UnsupportedError, match=r"pi05 tiny take 0\.0 GiB at least on this machine \(ranks: 2\), and it has"):
        check_host_memory(cell, policy)
