from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of `rank_scripts/collectives.py`, one of each of two real ranks."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(2, RANK_SCRIPTS / "collectives.py", str(out))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
