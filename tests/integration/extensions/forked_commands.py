"""Run commands of benchbox in forks of one interpreter that has imported what they need: `python forked_commands.py`.

Reads a request a line, `[arguments, folder, file]`, and answers with the exit code. The command prints into the file. The
parent only imports: every command finds what is installed when it begins, as a new interpreter would, and leaves nothing.
"""

import gc
import importlib
import json
import os
import sys

if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    import matplotlib.figure  # noqa: F401 (imports that reports and tables wait for)
    import pandas as pd  # noqa: F401

    import benchbox.report
    import benchbox.store.table  # noqa: F401
    from benchbox.cli.app import main

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        arguments, folder, file = json.loads(line)
        if pid := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        os.chdir(folder)
        for descriptor, path in ((0, os.devnull), (1, file), (2, f"{file}.err")):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
        importlib.invalidate_caches()
        sys.argv = ["benchbox", *arguments]
        sys.exit(main())
