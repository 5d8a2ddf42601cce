"""Compare the policies with the peers' own code: `make parity`.

Builds the environments of the peers in `build/parity` where they are missing, runs the tests of this folder, prints the table
of all comparisons, and writes it to `reports/parity/parity.md` if all of them passed. Exit code: that of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.parity.lerobot import ENVIRONMENT, V21_ENVIRONMENT, V30_ENVIRONMENT
from tests.parity.report import render_report
from tests.parity.table import read_rows

HERE = Path(__file__).parent
REPORT = HERE.parents[1] / "reports" / "parity" / "parity.md"


def main() -> int:
    for environment in (ENVIRONMENT, V21_ENVIRONMENT, V30_ENVIRONMENT):
        environment.build()
    rows = ENVIRONMENT.root / "rows.jsonl"
    rows.unlink(missing_ok=True)
    variables = os.environ | {"BENCHBOX_PARITY_ROWS": str(rows), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", HERE], env=variables, check=False)
    report = render_report(read_rows(rows) if rows.exists() else [])
    print(report)
    if done.returncode == 0:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(report)
    else:
        print(f"{REPORT} is unchanged, because the tests ended with exit code {done.returncode}", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
