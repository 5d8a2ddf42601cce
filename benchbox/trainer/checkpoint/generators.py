"""States of the random generators of torch, Python and numpy, as tensors of bytes."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

# Python's: the version of its format, 624 words and a position, and a second normal number that waits, if there is one.
_PYTHON = struct.Struct("<q625I?d")
# numpy's: 624 words, a position, and the same.
_NUMPY = struct.Struct("<624Iq?d")


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """Return the names of the generators that a rank on this device draws from."""
    return ("cpu", "python", "numpy", *(("cuda",) if device.type == "cuda" else ()))


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the state of each generator, (bytes,) uint8."""
    states = {"cpu": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators to the states of `generator_states`; a training that was saved on a CPU has none of a GPU."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    version, *words, is_waiting, normal = _PYTHON.unpack(_bytes(states["python"]))
    random.setstate((version, tuple(words), normal if is_waiting else None))
    *keys, position, is_waiting, normal = _NUMPY.unpack(_bytes(states["numpy"]))
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(is_waiting), normal))


def _python_state() -> Tensor:
    version, words, normal = random.getstate()
    return _tensor(_PYTHON.pack(version, *words, normal is not None, normal or 0.0))


def _numpy_state() -> Tensor:
    _, keys, position, is_waiting, normal = np.random.get_state(legacy=True)
    return _tensor(_NUMPY.pack(*map(int, keys), position, bool(is_waiting), normal))


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _bytes(state: Tensor) -> bytes:
    return bytes(state.numpy().tobytes())
