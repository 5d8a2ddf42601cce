"""A gate as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchbox.report.gate.view import GateView


def render_gate_json(view: GateView) -> str:
    """Render the verdict, every demand, and the noise of the machine where it was measured."""
    noise = None if view.noise is None else asdict(view.noise)
    content = {"verdict": view.verdict, "rows": [row.to_dict() for row in view.rows], "noise": noise}
    return json.dumps(content, indent=1) + "\n"
