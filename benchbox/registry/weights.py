"""Published weights: the files of a path, and the report of a policy that loaded them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.registry.launch_record import WeightsRecord

_SINGLE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """Names of the parameters that a policy loaded from published weights.

    `loaded` and `missing` are parameters of the policy; the missing ones are as they were initialised. `unexpected` are tensors
    of the files that the policy has no parameter for. `fitted` maps parameters of another size to how they were fitted.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    fitted: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the form of records: the number of loaded parameters, and the other names with one for all layers."""
        return {
            "loaded": len(self.loaded),
            "missing": _across_layers(self.missing),
            "unexpected": _across_layers(self.unexpected),
            "fitted": self.fitted,
        }


def weights_text(weights: WeightsRecord | None) -> str | None:
    """Return the published weights of a launch record as one line of text."""
    if weights is None:
        return None
    remainders = {"not in it": weights["missing"], "not taken": weights["unexpected"]}
    parts = [f"{weights['loaded']} parameters", *(f"{name}: {', '.join(names)}" for name, names in remainders.items() if names)]
    return "; ".join([*parts, *(f"{name}: {adaptation}" for name, adaptation in weights["fitted"].items())])


def _across_layers(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a path: the file, those of an index, or of a folder those of its index, its
    `model.safetensors`, or all in it. Their headers are read, so that damage is reported early.

    Raises:
        DataError: a file is missing, damaged or of another format: pickles are not read.
    """
    if path.is_dir():
        path = next((path / name for name in (_INDEX, _SINGLE_FILE) if (path / name).is_file()), path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.suffix == ".json":
        files = _files_of_index(path)
    if not files:
        raise DataError(f"{path}: there are no safetensors files in it")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except FileNotFoundError:
            raise DataError(f"{file}: there is no such file") from None
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: not a whole safetensors file ({error})") from None
    return files


def _files_of_index(index: Path) -> list[Path]:
    """Return the files that an index of shards names."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [index.parent / name for name in sorted(names)]
    except FileNotFoundError:
        raise DataError(f"{index}: there is no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{index}: not an index of safetensors files ({type(error).__name__}: {error})") from None
