"""Builds sessions and compares float32 masters with the weights the policy was built with: `masters.py JOB.json`, the job being
`{"cells": [cell, ...], "out": folder}`.

For each cell every rank writes `<index>-<rank>.json`: the number of parameters that train, the names of those whose masters are
not bit for bit the built weights, of those whose live values are not the masters rounded, and the settings observed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param

from benchbox.observer.introspect.names import live_parameters
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell
from tests.integration.rank_scripts.cells import forget
from tests.support.direct_construction import initial_parameters


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    rank = int(os.environ["RANK"])
    for index, values in enumerate(job["cells"]):
        result = compare(Cell.from_dict(values), rank)
        (Path(job["out"]) / f"{index}-{rank}.json").write_text(json.dumps(result))
        forget()
    dist.barrier()
    dist.destroy_process_group()


def compare(cell: Cell, rank: int) -> dict:
    built = initial_parameters(cell)
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank)) as stream:
        session = build_session(cell, policy, stream.statistics)
    trained = {name: parameter for name, parameter in live_parameters(session.model) if parameter.requires_grad}
    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in trained.items()}
    with GatheredParameters([parameter for parameter in trained.values() if hasattr(parameter, "ds_id")]):
        live = {name: parameter.detach().clone() for name, parameter in trained.items()}
    return {
        "trained": len(trained),
        "frozen": len(built) - len(trained),
        "unlike_built": sorted(name for name, master in masters.items() if not same_bits(master, built[name])),
        "unlike_live": sorted(
            name for name, master in masters.items() if not torch.equal(master.to(live[name].dtype), live[name])
        ),
        "settings": session.backend.observe().settings,
    }


def same_bits(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    return tensor.dtype == wanted.dtype and torch.equal(tensor.view(torch.int32), wanted.view(torch.int32))


if __name__ == "__main__":
    main(sys.argv[1])
