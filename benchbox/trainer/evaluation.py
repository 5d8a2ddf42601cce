"""Evaluation between two steps of a training, without a trace in it."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.session import Session


@contextmanager
def evaluating(session: Session, seed: int) -> Iterator[None]:
    """Switch a session to evaluation, with generators of its own; afterwards modes, generators and shards are what they were.

    Policies of benchbox draw nothing, but code of others may draw from any of the generators of the process. A module that was
    in evaluation mode before, such as a frozen one, stays in it.

    Args:
        seed: the generators begin with it, so that every evaluation draws the same numbers.
    """
    seed %= 2**32  # the limit of NumPy
    device = session.device
    modes = [(module, module.training) for module in session.model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            session.model.eval()
            yield
            session.backend.reshard()
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, training in modes:
            module.training = training
