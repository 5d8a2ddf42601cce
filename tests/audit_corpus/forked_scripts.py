"""Run scripts in forks of one interpreter that imports torch once: `python forked_scripts.py SCRIPTS OUT < cases.json`.

The cases are `{name: arguments of python}`. Prints `{name: [process id, exit code]}`. What a script prints is in `OUT/<name>`.
"""

import atexit
import gc
import json
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401 (the first optimizer imports it)


def run(scripts, arguments, printed):
    """Become `python ARGUMENTS` in a new folder, with output into a file."""
    folder = printed.with_suffix(".files")
    folder.mkdir()
    os.chdir(folder)
    descriptor = os.open(printed, os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.path[0] = str(scripts)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(scripts / arguments[0]), *arguments[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    scripts, out = map(Path, sys.argv[1:])
    children = {}
    gc.freeze()
    for name, arguments in json.load(sys.stdin).items():
        pid = os.fork()
        if not pid:
            run(scripts, arguments, out / name)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)  # tearing torch down would take longer than the script
        children[name] = pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(children))
