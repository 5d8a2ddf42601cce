"""Log one step of every rank: rank r has r samples with a response, of mean r, among 2 samples."""

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
log = MetricsLog(Path(sys.argv[1]), start=0, block_steps=1, is_writer=rank == 0)
log.add(0, StepResult(torch.tensor(0.5), torch.tensor(1.0), parts, 2, (1e-4,), counts))
dist.destroy_process_group()
