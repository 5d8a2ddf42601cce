"""Predictions of cells in the user's cache, so that a cell is traced once. Reading them imports no torch.

`$XDG_CACHE_HOME/benchbox/predictions/<fingerprint>/<cell id>.<device>.json`, under ZeRO-3, with a backbone that begins frozen
and under `padding: longest` with the step before the device. The fingerprint is of everything but the cell that a trace depends
on: the sources of benchbox and of the policy, the metadata of the datasets, the tokenizer, and the libraries.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchbox.errors import BenchboxError
from benchbox.launch.fingerprint import benchbox_sha256, data_sha256, policy_sha256
from benchbox.registry.versions import installed_version
from benchbox.spec.cell import Cell
from benchbox.store.files import read_json, write_json
from benchbox.store.machine_cache import user_cache
from benchbox.theory.prediction import Estimate

_LIBRARIES = ("torch", "transformers", "lerobot", "diffusers")


@dataclass(frozen=True, slots=True)
class PredictionCache:
    """Predictions for a step of cells on a device.

    Args:
        policy_dirs: where policies are looked for first.
        step: see `Estimator.estimate`.
        device: what the cells would run on.
    """

    policy_dirs: Sequence[Path]
    step: int | None
    device: Literal["cpu", "cuda"] = "cpu"
    _folders: dict[tuple[Any, ...], Path] = field(default_factory=dict)
    _names: dict[Path, set[str]] = field(default_factory=dict)

    def read(self, cell: Cell) -> Estimate | None:
        """Return the prediction for a cell, or None: not there, damaged, or of another cell with the same id."""
        folder = self._folder(cell)
        if folder not in self._names:  # one listing is faster than thousands of files that are not there
            self._names[folder] = {file.name for file in folder.glob("*.json")}
        if not self._names[folder] or (name := self._name(cell)) not in self._names[folder]:
            return None
        try:
            values = read_json(folder / name)
            return Estimate(**values["prediction"]) if values["cell"] == cell.to_dict() else None
        except (BenchboxError, KeyError, TypeError):
            return None

    def write(self, cell: Cell, prediction: Estimate) -> None:
        """Keep a prediction, unless the cache cannot be written."""
        folder, name = self._folder(cell), self._name(cell)
        try:
            write_json(folder / name, {"cell": cell.to_dict(), "prediction": prediction.to_dict()})
        except OSError:
            return
        self._names.setdefault(folder, set()).add(name)

    def _name(self, cell: Cell) -> str:
        matters = cell.backend == "zero3" or cell.optim.freeze_backbone_steps > 0 or cell.padding != "full"
        step = f".step{self.step}" if matters and self.step is not None else ""
        return f"{cell.cell_id}{step}.{self.device}.json"

    def _folder(self, cell: Cell) -> Path:
        key = (cell.policy, cell.data)
        if key not in self._folders:
            self._folders[key] = user_cache() / "predictions" / self._fingerprint(cell)
        return self._folders[key]

    def _fingerprint(self, cell: Cell) -> str:
        sources = benchbox_sha256(), policy_sha256(cell.policy, self.policy_dirs), data_sha256(cell.data)
        parts = [*sources, *map(installed_version, _LIBRARIES)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
