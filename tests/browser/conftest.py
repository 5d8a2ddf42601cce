"""The browser in which pages are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.chromium import Chromium, find_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on this machine: no page was opened in a browser")
    with Chromium(path) as chromium:
        yield chromium
