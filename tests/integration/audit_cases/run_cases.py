"""Runs scripts of `cases/` one after another in this process under an observer, each with its bug and repaired.

`python run_cases.py OUT NAME ...`, in one process or as a rank. Every rank writes into the folder OUT, as
`<name>-<variant>-<rank>.json`, the facts its observer gave, or `{"failed": traceback}`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from benchbox.observer.facts import Contract
from benchbox.observer.observer import StepObserver

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 6  # of the eight and more that every script takes
VARIANTS = {"buggy": False, "repaired": True}


def main(out: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent / "cases"))
    rank = os.environ.get("RANK", "0")
    for name in names:
        for variant, repaired in VARIANTS.items():
            try:
                result = observe_script(name, repaired, Path(out) / f"{name}-{variant}")
            except Exception:
                if dist.is_initialized():
                    raise  # another rank may be waiting for this one
                result = {"failed": traceback.format_exc()}  # the other cases can still run
            (Path(out) / f"{name}-{variant}-{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def observe_script(name: str, repaired: bool, folder: Path) -> dict[str, Any]:
    """Return the facts of one run of a script in a separate folder, which its ranks share."""
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder), isolated():
        case = importlib.import_module(name)
        gc.freeze()  # or every collection would visit all of the libraries
        contract = Contract(**case.CONTRACT) if hasattr(case, "CONTRACT") else None
        if hasattr(case, "earlier"):  # a run before the one that is audited, in this folder too
            case.earlier(repaired)
            gc.collect()
        with StepObserver(source="command", steps=STEPS, contract=contract) as observer:
            case.main(repaired)
        return observer.facts().to_dict()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Undo the changes of a script to the process, but keep the process group, because starting one takes seconds."""
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            torch.set_default_dtype(torch.float32)
            AcceleratorState._reset_state()
            GradientState._reset_state()
            PartialState._shared_state.clear()
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
