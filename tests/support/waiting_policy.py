"""The policy of `reports/noise` whose steps wait for a timer: other work on the machine disturbs it less than a computation."""

from __future__ import annotations

import shutil
from pathlib import Path

POLICY = Path(__file__).parents[2] / "reports" / "noise" / "policies" / "waiting" / "policy.py"


def write_waiting_policy(folder: Path, **waits_s: float) -> Path:
    """Write the policy with a size of each name, whose forward waits as long, and return the folder for `--policy-dir`."""
    policy = folder / "policies" / "waiting"
    policy.mkdir(parents=True)
    shutil.copy(POLICY, policy)
    (policy / "presets.yaml").write_text("".join(f"{size}: {{wait_s: {wait_s}}}\n" for size, wait_s in waits_s.items()))
    return policy.parent
