"""Steps of ranks whose batches have different optional blocks.

`python -m torch.distributed.run --nproc-per-node 2 rank_scripts/presence.py FOLDER`.

Each rank writes `<rank>.json`: for every case the collectives of its step and its loss, and the error of an incomplete batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.errors import DataError
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy
from tests.support.ranks import tiny_cell

OPTIONAL = ("response_mask", "metadata_mask", "subgoal_mask")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cell = tiny_cell(policy="pi07_low_level", backend="fsdp2", recipe="fp32")
    policy = build_cell_policy(cell).eval()  # evaluation drops no inputs
    samples = SyntheticSamples(policy.batch_spec(), 0)
    session = build_session(cell, policy, samples.statistics)
    batch = default_collate([samples.sample(0, index) for index in range(2)])
    full = batch | {name: torch.ones_like(batch[name]) for name in OPTIONAL}
    empty = batch | {name: torch.zeros_like(batch[name]) for name in OPTIONAL}
    cases = {
        "both": (full, full),
        "first": (full, empty),
        "second": (empty, full),
        "neither": (empty, empty),
        "one each": (full | {"subgoal_mask": empty["subgoal_mask"]}, empty | {"subgoal_mask": full["subgoal_mask"]}),
    }
    results = {}
    for name, batches in cases.items():
        counter = CollectiveCounter()
        with OperationDispatchMode(counter):
            step = session.step(iter([batches[rank]]))
        results[name] = {"collectives": counter.counts, "loss": float(step.loss)}
    lacking = dict(full)
    if rank == 1:
        del lacking["subgoal_mask"]
    try:
        session.step(iter([lacking]))
    except DataError as error:
        results["lacking"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    time.sleep(0.5)  # gloo ends the last collective in a thread, and torch aborts if Python has exited before that
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
