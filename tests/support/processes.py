"""Environment of Python processes that tests start to run code of their own."""

import sys


def minimal_environment(**variables: str) -> dict[str, str]:
    """Return variables with which a process imports what this one can (benchbox, tests.support), and little else."""
    return {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"} | variables
