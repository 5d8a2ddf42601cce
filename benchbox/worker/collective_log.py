"""Collectives that this rank called last, from torch's flight recorder, and the Python stack of its main thread.

torch records every collective of NCCL and gloo in a ring buffer, in C++, so that reading it costs timed steps nothing. Torch
2.10 does so for gloo only where TORCH_FR_BUFFER_SIZE is set, as in measured launches (`benchbox.measure.collective_times`). It
is read from a thread, because the main thread may wait in a collective that never ends.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from benchbox.store.files import write_json
from benchbox.store.rank_collectives import LAST_CALLS, RankCollectives

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.registry.launch_record import CollectiveCall

# NCCL has a recorder of its own; a build of torch without it has only that of gloo.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip


def write_collectives(path: Path) -> None:
    """Write the last collectives of this rank and the stack of its main thread. To be called from any thread."""
    calls, reason = _read_calls()
    value: RankCollectives = {"calls": calls, "stack": _main_stack(), "reason": reason}
    write_json(path, value, indent=None)


def _main_stack() -> str:
    frame = sys._current_frames()[threading.main_thread().ident or 0]  # noqa: SLF001 (it has no public name)
    return "".join(traceback.format_stack(frame))


def _read_calls() -> tuple[list[CollectiveCall], str | None]:
    """Return the last calls, oldest first, or none and the reason."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not getattr(dist, "is_initialized", bool)():
        return [], "the rank had no process group"
    bindings = sys.modules.get("torch._C._distributed_c10d")
    dumps = [dump for name in _DUMPS if (dump := getattr(bindings, name, None)) is not None]
    if not dumps:
        return [], f"torch {sys.modules['torch'].__version__} has no flight recorder that can be read"
    traces = [json.loads(dump(True, False)) for dump in dumps]  # with all collectives, not only active ones
    entries = [(trace, entry) for trace in traces for entry in trace.get("entries", []) if not entry["is_p2p"]]
    entries.sort(key=lambda pair: pair[1]["time_created_ns"])
    if not entries:
        return [], "torch's flight recorder has no entry: TORCH_FR_BUFFER_SIZE may be 0"
    return [_call(trace, entry) for trace, entry in entries[-LAST_CALLS:]], None


def _call(trace: dict[str, Any], entry: dict[str, Any]) -> CollectiveCall:
    name, description = entry["process_group"]
    config = trace.get("pg_config", {})
    group = config.get(name) or (config.get("") if name == "0" else None)  # gloo's default group has no name there
    return {
        "group": f"{description} {name}" if description not in ("", "undefined") else name,
        "ranks": json.loads(group["ranks"]) if group else None,
        "sequence": entry["collective_seq_id"],
        "operation": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        "dtypes": [_DTYPES.get(dtype, dtype) for dtype in entry["input_dtypes"]],
        "shapes": entry["input_sizes"],
        "is_done": entry["retired"] or entry["state"] == "completed",
    }
