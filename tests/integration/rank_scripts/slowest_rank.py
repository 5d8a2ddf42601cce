"""Times calls on two ranks, whose clocks advance by one and by two seconds each time they are read: pass a folder."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchbox.measure.links import time_collectives
from benchbox.measure.peaks import all_reduce_rate, copy_rate, update_rate
from benchbox.trainer.gauges import DataWaitClock, TrainingGauges

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, cpu, readings = dist.get_rank(), torch.device("cpu"), itertools.count()
time.perf_counter = lambda: float(next(readings) * (1 + rank))
clock = DataWaitClock(cpu)
with clock.step(), clock.phase("data_wait"):
    pass
gauges = TrainingGauges(clock, cpu, samples_per_step=1, samples_per_epoch=None, mfu=lambda _: (None, None))
result = {
    "links": time_collectives((64,), cpu, lambda: None),
    "copy": copy_rate(64, cpu, 0.001)["per_s"],
    "update": update_rate(64, cpu, 0.001)["per_s"],
    "all_reduce": all_reduce_rate(64, cpu, 0.001)["per_s"],
    "data_wait_s": gauges.read([0], 1.0)[0]["data_wait_s"],
}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
