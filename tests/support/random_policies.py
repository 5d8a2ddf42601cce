"""Random modules as policies: `python -m tests.support.random_policies DIR FIRST COUNT` writes the policy `zoo` into a folder,
with a size for each seed, `random_7`.

Parameters and buffers meet backends here in ways that nobody has thought of. Such modules have shown what FSDP1 does to
transposed weights, and what norms of gradients take under DeepSpeed.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

ZOO = Path(__file__).parents[1] / "integration" / "policies" / "zoo"
KINDS = re.findall(r"^class (\w+)\(Residual\)", (ZOO / "policy.py").read_text(), re.MULTILINE)


def random_preset(seed: int) -> dict[str, Any]:
    """Return the blocks of a module, one of which may be called twice, and the form of its output and loss."""
    draw = random.Random(seed)
    return {
        "blocks": draw.choices(KINDS, k=draw.randint(2, 7)),
        "reuse": draw.choice((-1, 0, 1)),
        "horizon": draw.choice((3, 6, 7)),
        "dims": 8,
        "output": draw.choice(("tensor", "dict", "tuple")),
        "loss": draw.choice(("scalar", "samples")),
    }


def write_random_policies(folder: Path, seeds: range) -> list[str]:
    """Write the policy `zoo` into a folder, and return its sizes."""
    shutil.copytree(ZOO, folder / "zoo", ignore=shutil.ignore_patterns("__pycache__"))
    presets = {f"random_{seed}": random_preset(seed) for seed in seeds}
    (folder / "zoo" / "presets.yaml").write_text(yaml.safe_dump({"tiny": random_preset(0), **presets}, sort_keys=False))
    return list(presets)


if __name__ == "__main__":
    first, count = map(int, sys.argv[2:])
    print(*write_random_policies(Path(sys.argv[1]), range(first, first + count)))
