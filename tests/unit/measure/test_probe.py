from __future__ import annotations

import torch
from torch import nn
from torch.profiler import record_function

from benchbox.measure.phases import NONE
from benchbox.measure.probe import StepProbe


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x):
        q = self.query(x)
        return x + nn.functional.scaled_dot_product_attention(q, q, q)


class SmallSession:
    """Smallest session that can be probed."""

    def __init__(self):
        self.model = nn.Sequential(Layer(), Layer())
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, micro_batches, instruments=NONE):
        with instruments.step():
            with instruments.phase("forward"):
                loss = self.model(next(micro_batches)).square().mean()
            with instruments.phase("backward"):
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def batches():
    while True:
        yield torch.randn(1, 2, 8, 16)


def probe(session, source):
    """Take a step under a probe."""
    step_probe = StepProbe(session.model, (Layer,), torch.device("cpu"))
    with step_probe:
        session.step(step_probe.record(source))
    return step_probe.result()


def test_one_probe_sees_kernels_flops_and_memory():
    session = SmallSession()
    session.step(batches())
    result = probe(session, batches())
    assert result.attention_kernel == "sdpa:flash_cpu"
    assert result.checkpointed_modules == 0
    assert result.matmul_dtypes == {"float32"}
    assert result.collectives == {}
    assert result.flops["model_flops_per_step"] > 0
    assert [batch.shape for batch in result.micro_batches] == [(1, 2, 8, 16)], "the batches of the probed step"
    parameters = sum(p.numel() * 4 for p in session.model.parameters())
    assert result.memory["source"] == "tensor_storage"
    assert result.memory["allocated_peak_bytes"] > 4 * parameters, "parameters, gradients and two moments at least"
    assert result.memory["reserved_peak_bytes"] is None
    assert result.memory["reason"]
    assert result.utilisation([1.0])["mfu"] is None


def test_probing_does_not_change_what_a_step_computes():
    def train(is_probed):
        torch.manual_seed(0)
        session, source = SmallSession(), batches()
        for _ in range(3):
            session.step(source)
        if is_probed:
            probe(session, source)
        else:
            session.step(source)
        return [p.detach().clone() for p in session.model.parameters()]

    for plain, probed in zip(train(is_probed=False), train(is_probed=True), strict=True):
        assert torch.equal(plain, probed)


def test_flops_are_unknown_under_compiled_flex_attention():
    class Flex(Layer):
        def forward(self, x):
            with record_function("flex_attention"):  # the annotation around a compiled call
                return super().forward(x)

    session = SmallSession()
    session.model = nn.Sequential(Flex())
    result = probe(session, batches())
    assert result.flops["model_flops_per_step"] is result.flops["recomputed_flops_per_step"] is None
    assert result.utilisation([1.0]) == {"mfu": None, "hfu": None, "mfu_reason": result.flops["reason"]}
    assert "FlexAttention" in result.flops["reason"]
