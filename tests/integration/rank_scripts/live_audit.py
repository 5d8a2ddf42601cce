"""Audits a DDP training by `benchbox.audit_precision`, of which rank 1 alone steps bfloat16: `live_audit.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import benchbox

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).to(torch.bfloat16 if rank == 1 else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)


def step() -> None:
    model(torch.ones(2, 8, dtype=model.weight.dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


result = benchbox.audit_precision(model, optimizer, step)
found = [[finding.code, finding.rank] for finding in result.findings if finding.severity == "error"]
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps({"pid": os.getpid(), "ranks": len(result.facts), "errors": found}))
dist.destroy_process_group()
