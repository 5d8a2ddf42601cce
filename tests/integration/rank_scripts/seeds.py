"""One of two real ranks: prepares a session, and writes what its generators draw next and a weight of its policy."""

from __future__ import annotations

import json
import random
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from tests.support.ranks import tiny_cell


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cell = tiny_cell(policy="value", seed=3)
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank)) as stream:
        session = build_session(cell, policy, stream.statistics)
    draws = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    weight = next(session.backend.prepared.model.parameters()).sum().item()
    (Path(out) / f"{rank}.json").write_text(json.dumps({"draws": draws, "weight": weight}))
    dist.destroy_process_group()


main(*sys.argv[1:])
