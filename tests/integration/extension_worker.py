"""The worker with the folder `extensions` beside that of its launch as TORCH_EXTENSIONS_DIR. All else is unchanged.

torch and DeepSpeed read the variable when they look for an extension, not when they are imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchbox.worker.rank import run_rank

if __name__ == "__main__":
    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.argv[1]).parents[1] / "extensions")
    run_rank(sys.argv[1])
