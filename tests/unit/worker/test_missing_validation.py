"""Warning of a training that was stopped in the validation after its last step."""

from pathlib import Path

import pytest

from benchbox.spec.train import load_train
from benchbox.worker.training import _describe_missing_validation

MISSING = "the training was asked to stop, and has no validation after its last step"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, ": benchbox validate out computes it"),
        ({"validation.max_samples": "7"}, ": benchbox validate out --max-samples 7 computes it"),
        (
            {"validation.weights": "averages", "optim.ema_decay": "0.9", "validation.max_samples": "7"},
            ": benchbox validate out --ema --max-samples 7 computes it",
        ),
        ({"checkpoint.every": "0"}, ""),
    ],
)
def test_the_command_that_computes_the_missing_validation_is_named_where_there_is_a_checkpoint(
    settings: dict[str, str], remedy: str
) -> None:
    data = {"data": "{lerobot: benchbox/data/sample_dataset, validation: 0.1}", "validation.every": "10"}
    assert _describe_missing_validation(load_train("pi05", data | settings), Path("out")) == f"{MISSING}{remedy}"
