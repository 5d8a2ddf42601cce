from __future__ import annotations

import pytest

from benchbox.optim import passes


@pytest.fixture
def native_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the compiled functions for small tensors too."""
    monkeypatch.setattr(passes, "MIN_NATIVE_ELEMENTS", 1)
