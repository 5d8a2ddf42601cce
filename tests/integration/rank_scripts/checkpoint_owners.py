"""Decides on two ranks which of them writes what: `checkpoint_owners.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchbox.dcp.shards import full_shards, row_shards
from benchbox.trainer.checkpoint.owners import PartOwners


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    owners = PartOwners()
    tensors = {
        "large": full_shards(torch.ones(100)),
        "small": full_shards(torch.ones(40)),
        "smaller": full_shards(torch.ones(50)),
        "sharded": row_shards(torch.ones(2, 5), (4, 5), 2 * rank),
        f"generator/{rank}": full_shards(torch.ones(8)),
    }
    answers = [owners.owned(tensors, dist.group.WORLD)]
    answers.append(owners.owned(tensors, dist.group.WORLD))
    if rank:
        tensors["late"] = full_shards(torch.ones(1))  # of one rank only, whose layout has changed
    answers.append(owners.owned(tensors, dist.group.WORLD))
    owned = [sorted(key for key, shards in answer.items() if shards.boxes) for answer in answers]
    (folder / f"rank{rank}.json").write_text(json.dumps(owned))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
