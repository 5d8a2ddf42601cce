"""Training steps that are captured in a CUDA graph, beside the observer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchbox.observer.observer import StepObserver

WARM_UP, REPLAYS = 3, 4


def train(device: torch.device) -> list[torch.Tensor]:
    """Step a few times, capture a step in a graph and replay it, as CUDA graphs are used; return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    batch = torch.randn(4, 8, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(REPLAYS):
        graph.replay()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("watched_steps", [20, 6, 2 * WARM_UP + 1, WARM_UP + 1])
def test_a_captured_step_trains_as_without_the_observer(cuda: torch.device, watched_steps: int) -> None:
    """The captured step is one of those between, the recorded, the middle and the last of the watched ones."""
    alone = train(cuda)
    with StepObserver(source="command", steps=watched_steps) as observer:
        watched = train(cuda)
    assert all(map(torch.equal, watched, alone))
    facts = observer.facts()
    assert facts.problems == ()
    assert [observed.step for observed in facts.steps] == list(range(1, WARM_UP + 1))
    assert facts.opaque == ()
