"""The worker with slow data on rank 0, in cells of the size `slow_data`. All else is unchanged."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.worker.rank import run_rank

sample = SyntheticSamples.sample


def slow_sample(self: SyntheticSamples, *args: Any) -> Any:
    time.sleep(0.015)
    return sample(self, *args)


if __name__ == "__main__":
    if json.loads(Path(sys.argv[1]).read_text())["cell"]["size"] == "slow_data" and os.environ["RANK"] == "0":
        SyntheticSamples.sample = slow_sample
    run_rank(sys.argv[1])
