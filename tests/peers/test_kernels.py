"""The kernels that are repeated are all products, convolutions and attention of a step."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from benchbox.measure.flops import FlopCounter
from benchbox.measure.phases import NONE
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from tests.peers.ours import kernels_of, prepare_step
from tests.peers.policies import PEERS, batch_of, build_peer


class PhaseNames:
    """Instrument that keeps the names of phases."""

    def __init__(self):
        self.names = []

    def step(self):
        return NONE.step()

    @contextmanager
    def phase(self, name):
        self.names.append(name)
        yield


def test_the_kernels_of_a_step_are_repeated_with_all_its_flops_and_without_changing_it():
    peer = PEERS["pi0-tiny"]
    policy = build_peer(peer, "sdpa")
    session, step = prepare_step(peer, policy, batch_of(policy, peer), attention="sdpa")
    of_step, of_repetition, phases = FlopCounter(), FlopCounter(), PhaseNames()
    with OperationDispatchMode(of_step):
        step(NONE)
    repeat_kernels = kernels_of(step)
    weights = [parameter.detach().clone() for parameter in session.model.parameters()]
    with OperationDispatchMode(of_repetition):
        losses = [float(repeat_kernels(phases)), float(repeat_kernels(NONE))]
    assert of_repetition.total == 2 * of_step.total > 0
    assert phases.names == ["forward", "backward"]
    assert losses[0] == losses[1]
    assert all(map(torch.equal, weights, session.model.parameters()))
    assert float(step(NONE)) < losses[0]
