from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded_on_one_thread(one_thread: None) -> None:
    torch.manual_seed(0)
