"""Settings of backends, read from live objects."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchbox.backends.settings import _combine, _read, read_settings


class Prefetch(Enum):
    PRE = 1


def test_one_process_has_settings_of_its_optimizer_alone() -> None:
    model = nn.Linear(2, 1)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    assert read_settings(model, [fused]) == {"optimizer_fused": True, "optimizer_foreach": None}


@pytest.mark.parametrize(
    ("values", "combined"),
    [
        ([], None),
        ([None, None], None),
        ([True, True], True),
        ([True, False], "False, True"),
        ([torch.bfloat16], "bfloat16"),
        ([Prefetch.PRE, Prefetch.PRE], "PRE"),
        ([25, 26], "25, 26"),
    ],
)
def test_units_with_one_value_share_it_and_different_ones_are_all_named(values: list, combined: object) -> None:
    assert _combine(values) == combined


def test_an_attribute_that_a_library_lacks_is_null() -> None:
    """Private attributes come and go with versions, and none is worth a failed measurement."""
    assert _read([SimpleNamespace(_use_orig_params=True)], ("_use_orig_params", "_offload_params")) == {
        "use_orig_params": True,
        "offload_params": None,
    }
