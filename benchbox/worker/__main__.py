"""`python -m benchbox.worker JOB.json`, one process a rank."""

from __future__ import annotations

import sys

from benchbox.worker.rank import run_rank

if __name__ == "__main__":
    run_rank(sys.argv[1])
