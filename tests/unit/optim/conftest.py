from __future__ import annotations

import pytest

from benchbox.optim import passes


@pytest.fixture
def worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "WORTHWHILE_ELEMENTS", 1)
