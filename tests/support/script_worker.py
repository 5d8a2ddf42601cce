"""Worker that runs a script as a rank, with the arguments that its job file holds."""

import faulthandler
import json
import runpy
import sys
from pathlib import Path

faulthandler.enable()  # a crash in C code says what ran
job = json.loads(Path(sys.argv[1]).read_text())
sys.argv = [job["script"], *job["arguments"]]
runpy.run_path(job["script"], run_name="__main__")
