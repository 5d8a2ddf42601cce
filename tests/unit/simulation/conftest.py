"""Processes that fork environments as `benchbox eval` does."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_threads_of_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what importing `benchbox.data.text.fast` sets: tokenizers 0.22 warns in a fork after its threads."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
