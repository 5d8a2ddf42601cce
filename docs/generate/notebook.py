"""Write docs/python.ipynb, executed: `python docs/generate/notebook.py [FILE]`.

The notebook shows the Python interface on a published run. Outputs are those of the code of today, without times, paths and
versions of the notebook's own libraries, so that a test can compare them with the committed file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "python.ipynb"

CELLS = (
    (
        "markdown",
        """# benchbox from Python

This notebook reads a published run, compares two runs and audits a training loop. It runs in the root of the repository, and
`make docs` executes it anew. [From Python](python.md) describes the names that it uses.""",
    ),
    (
        "code",
        """import benchbox

results = benchbox.load("reports/fsdp_vs_zero2")
results""",
    ),
    (
        "markdown",
        """## Data frames

`results.cells` has a row for each cell: its fields, its status and every metric over launches.""",
    ),
    (
        "code",
        """ok = results.cells.query("status == 'ok' and batch == 2")
ok.pivot(index=["cams", "attention"], columns="backend", values="global_samples_per_s").round(1)""",
    ),
    ("markdown", "`results.steps` has a row for each launch, step and rank, with the seconds of each phase."),
    (
        "code",
        """cell = ok.index[0]
steps = results.steps.query("cell_id == @cell")
(1000 * steps.groupby("rank")[["forward_s", "backward_s", "optimizer_s"]].median()).round(1)  # ms""",
    ),
    (
        "markdown",
        """## Two runs

Two repetitions of the same matrix on the same machine: the largest batches of all walks are equal, and throughput differs by
noise, about which six launches on each side settle nothing. `compare` says so instead of naming a winner.""",
    ),
    (
        "code",
        """import pandas as pd

comparison = benchbox.compare("reports/repeated/1", "reports/repeated/2", metrics=["global_samples_per_s"])
print(comparison.counts)
changes = pd.DataFrame(comparison.changes)
changes[changes["ratio"].notna()][["cell", "metric", "base", "head", "ratio", "verdict"]].iloc[6:10].round(3)""",
    ),
    (
        "markdown",
        """## Auditing a training loop

The optimizer below steps bfloat16 weights, which lose most of its updates. The audit takes three steps and says so.""",
    ),
    (
        "code",
        """import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = torch.randn(16, 64, dtype=torch.bfloat16)


def step():
    optimizer.zero_grad()
    model(batch).float().square().mean().backward()
    optimizer.step()


result = benchbox.audit_precision(model, optimizer, step)
for finding in result.findings:
    print(finding.severity, finding.code, finding.title)
print(f"updates that arrive (EDQ): {result.numbers['edq']:.1f}")""",
    ),
    ("markdown", "With float32 weights under autocast every update arrives, and nothing is left to report."),
    (
        "code",
        """model = model.float()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def step():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch.float()).float().square().mean()
    loss.backward()
    optimizer.step()


result = benchbox.audit_precision(model, optimizer, step)
result.check()  # raises ThresholdError if there is an error
print(f"updates that arrive (EDQ): {result.numbers['edq']:.1f}")""",
    ),
)


def build_notebook() -> dict[str, Any]:
    """Return the notebook with the outputs of its cells.

    Raises:
        CellExecutionError: a cell failed.
    """
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, (kind, source) in enumerate(CELLS):
        make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        notebook.cells.append(make(source, id=f"cell-{number}"))
    with TemporaryDirectory() as sockets:  # files instead of ports: no network
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        NotebookClient(notebook, km=manager, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return dict(notebook)


def notebook_text(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    target.write_text(notebook_text(build_notebook()), encoding="utf-8")
