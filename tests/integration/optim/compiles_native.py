"""Gets the compiled functions with an empty cache in the folder of its argument, as each rank of a training does."""

from __future__ import annotations

import os
import sys

from benchbox.optim.native import library

if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] = sys.argv[1]
    assert library.cache_info().currsize == 0, "this process has them already"
    assert library() is not None
