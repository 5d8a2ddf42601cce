"""Log one step of every rank: rank r has r samples with a response, of mean r, among 2 samples. `metrics.py FOLDER`

Then log 12 steps with losses of two parts, in blocks of 1 step, and again in blocks of 5.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchbox.session import StepResult
from benchbox.trainer.metrics import MetricsLog

dist.init_process_group("gloo")
rank = dist.get_rank()
parts = {"flow": torch.tensor(1.0 + rank), "response": torch.tensor(float(rank)), "memory": torch.tensor(0.0)}
counts = {"flow": torch.tensor(2.0), "response": torch.tensor(float(rank)), "memory": torch.tensor(0.0)}
folder = Path(sys.argv[1])
log = MetricsLog(folder / "metrics.jsonl", start=0, block_steps=1, is_writer=rank == 0)
log.add(0, StepResult(torch.tensor(0.5), torch.tensor(1.0), parts, 2, (1e-4,), counts))
for block in (1, 5):
    log = MetricsLog(folder / f"blocks-{block}.jsonl", start=0, block_steps=block, is_writer=rank == 0)
    generator, count = torch.Generator().manual_seed(rank), torch.tensor(3.0)
    for step in range(12):
        parts = {name: torch.rand((), generator=generator) for name in ("flow", "response")}
        log.add(step, StepResult(torch.tensor(0.5), torch.tensor(1.0), parts, 3, (1e-4,), dict.fromkeys(parts, count)))
    log.flush()
dist.destroy_process_group()
