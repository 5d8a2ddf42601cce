"""The worker with one fault: DDP sums the gradients of its ranks and does not average them. All else is unchanged."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from benchbox.backends.replicated import Ddp
from benchbox.worker.rank import run_rank

prepare = Ddp._prepare


def sum_gradients(state, bucket):  # torch refuses annotations as text
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def prepare_without_average(self: Ddp, *args: Any) -> Any:
    prepared = prepare(self, *args)
    prepared.model.register_comm_hook(None, sum_gradients)
    return prepared


if __name__ == "__main__":
    Ddp._prepare = prepare_without_average
    run_rank(sys.argv[1])
