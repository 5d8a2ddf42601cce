from __future__ import annotations

import torch
from torch import nn
from torch.profiler import record_function

from benchbox.measure.phases import NONE, ProgressTracker
from benchbox.measure.probe import probe


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x):
        q = self.query(x)
        return x + nn.functional.scaled_dot_product_attention(q, q, q)


class Steps:
    """The smallest thing that can be probed."""

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


def test_one_probe_sees_kernels_flops_and_memory_and_reports_progress():
    steps, position = Steps(), ProgressTracker()
    steps.step(batches())
    seen = probe(steps, batches(), (Layer,), torch.device("cpu"), position)
    assert seen.attention_kernel == "sdpa:flash_cpu"
    assert seen.checkpointed_modules == 0
    assert seen.matmul_dtypes == {"float32"}
    assert seen.collectives == {}
    assert seen.flops["model_flops_per_step"] > 0
    assert [batch.shape for batch in seen.micro_batches] == [(1, 2, 8, 16)], "what was taken of it in the step looked at"
    parameters = sum(p.numel() * 4 for p in steps.model.parameters())
    assert seen.memory["source"] == "tensor_storage"
    assert seen.memory["allocated_peak_bytes"] > 4 * parameters, "parameters, gradients and two moments at least"
    assert seen.memory["reserved_peak_bytes"] is None
    assert seen.memory["reason"]
    assert seen.utilisation([1.0])["mfu"] is None
    assert position.state.step == 3, "a heartbeat must see that a slow probe moves"


def test_probing_does_not_change_what_a_step_computes():
    def losses(look):
        torch.manual_seed(0)
        steps, source = Steps(), batches()
        for _ in range(3):
            steps.step(source)
        if look:
            probe(steps, source, (Layer,), torch.device("cpu"))
        else:
            for _ in range(3):
                steps.step(source)
        return [p.detach().clone() for p in steps.model.parameters()]

    for plain, probed in zip(losses(look=False), losses(look=True), strict=True):
        assert torch.equal(plain, probed)


def test_what_flex_attention_multiplies_is_not_seen_so_nothing_is_claimed():
    class Flex(Layer):
        def forward(self, x):
            with record_function("flex_attention"):  # the mark around a compiled call
                return super().forward(x)

    steps = Steps()
    steps.model = nn.Sequential(Flex())
    seen = probe(steps, batches(), (Layer,), torch.device("cpu"))
    assert seen.flops["model_flops_per_step"] is seen.flops["recomputed_flops_per_step"] is None
    assert seen.utilisation([1.0]) == {"mfu": None, "hfu": None, "mfu_reason": seen.flops["reason"]}
    assert "FlexAttention" in seen.flops["reason"]
