"""torchrun, tied to the life of its parent, that leaves exit codes behind.

`python -m benchbox.launch.process.torchrun EXITS ARG...`

torchrun tells how its ranks ended only in prose. This writes the same as JSON to the file EXITS, first noticed first, so that
a killed rank is told from one that raised without reading a log.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies, even by SIGKILL: torchrun then ends its ranks. Elsewhere, do without."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    exits, *sys.argv[1:] = sys.argv[1:]
    _die_with_parent()
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except Exception as error:
        # torch's ChildFailedError, known by what it carries: importing its class costs the launcher nothing it needs.
        failures = getattr(error, "failures", {})
        listed = [{"rank": rank, "code": each.exitcode, "noticed_at": each.timestamp} for rank, each in failures.items()]
        Path(exits).write_text(json.dumps(listed))
        raise
    # All ranks ended well. Taking the interpreter down with torch loaded would keep the next launch waiting.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
