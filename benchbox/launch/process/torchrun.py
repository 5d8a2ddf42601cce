"""torchrun that ends with its parent and writes down the exit codes of its ranks.

`python -m benchbox.launch.process.torchrun EXITS ARG...`

torchrun reports how its ranks ended only as text in its log. This module writes the same as JSON to the file EXITS, in the
order in which torchrun noticed the failures, so that a killed rank is told from one that raised without parsing a log.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from benchbox.worker.parent import signal_on_parent_death


def main() -> None:
    exits, *sys.argv[1:] = sys.argv[1:]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    signal_on_parent_death(signal.SIGHUP)  # on which torchrun ends its ranks
    # A batch system may send these to every process. Ranks that train end after a step, and torchrun after them. Torchrun would
    # replace a handler of SIGTERM; ranks inherit that it is blocked, and wait for it from their start on.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except Exception as error:
        # torch's ChildFailedError, recognised by its attribute: importing the class would slow down the launcher.
        failures = getattr(error, "failures", {})
        rank_exits = [
            {"rank": rank, "code": failure.exitcode, "noticed_at": failure.timestamp} for rank, failure in failures.items()
        ]
        Path(exits).write_text(json.dumps(rank_exits))
        raise
    # All ranks ended well. Finalizing an interpreter that has loaded torch would delay the next launch.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
