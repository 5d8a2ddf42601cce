from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from benchbox.measure.kernels import CallSite, KernelNames, Recomputation
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.observer.hooks.matmuls import MatmulDtypes


def eager(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(dim=-1) @ v


def unfused(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def run_observed(*attentions):
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    kernels = KernelNames(CallSite(nn.Identity()))
    with OperationDispatchMode(kernels):
        for attention in attentions:
            attention(q, q, q).sum().backward()
    return kernels


def test_the_fused_kernel_is_named():
    assert run_observed(F.scaled_dot_product_attention).attention == "sdpa:flash_cpu"


def test_the_unfused_kernel_of_torch_is_distinguished_from_an_eager_softmax():
    """Both are matrix products and a softmax below autograd."""
    assert run_observed(unfused).attention == "sdpa:math"
    assert run_observed(eager).attention == "eager"


@pytest.mark.usefixtures("compiling")
@torch.no_grad()
def test_flex_attention_runs_under_the_dispatch_mode_and_is_named():
    """FlexAttention is a higher-order operator: torch runs it only under modes that declare support."""
    kernels, q = KernelNames(CallSite(nn.Identity())), torch.randn(1, 2, 16, 8)
    with OperationDispatchMode(kernels):
        attended = flex_attention(q, q, q)
    torch.testing.assert_close(attended, F.scaled_dot_product_attention(q, q, q), rtol=1e-5, atol=1e-5)
    assert kernels.attention == "flex"


@torch.no_grad()
def test_compiled_flex_attention_is_named_by_the_annotation_around_its_call():
    kernels = KernelNames(CallSite(nn.Identity()))
    with OperationDispatchMode(kernels), record_function("flex_attention"):
        pass
    assert kernels.attention == "flex"


@pytest.mark.usefixtures("compiling")
def test_compiled_code_stays_compiled_under_the_dispatch_mode():
    """Run operation by operation it would round differently and change the training."""
    runs = []

    def backend(graph, _example):
        return lambda *arguments: runs.append("compiled") or graph(*arguments)

    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    with OperationDispatchMode(KernelNames(CallSite(nn.Identity()))):
        compiled(torch.ones(3))
    assert runs == ["compiled"]


def test_a_mixture_names_all_of_it():
    assert run_observed(eager, F.scaled_dot_product_attention, unfused).attention == "sdpa:flash_cpu+sdpa:math+eager"


def test_no_attention_has_no_name():
    assert run_observed(lambda q, _k, _v: F.log_softmax(q, dim=-1)).attention is None


def test_dtypes_of_matmuls_are_those_that_ran():
    layer, matmuls = nn.Linear(4, 4), MatmulDtypes()
    with OperationDispatchMode(matmuls), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(2, 4))
    assert matmuls.counts == {"bfloat16": 1}


class Tower(nn.Module):
    """Checkpointed layers with one kernel, recomputed as modules or within them."""

    def __init__(self, attention, *, whole):
        super().__init__()
        self.whole = whole
        self.layers = nn.ModuleList(Attention(attention, whole=whole) for _ in range(2))

    def forward(self, q):
        for layer in self.layers:
            q = checkpoint(layer, q, use_reentrant=False) if self.whole else layer(q)
        return q


class Attention(nn.Module):
    def __init__(self, attention, *, whole):
        super().__init__()
        self.attention, self.whole = attention, whole
        self.norm = nn.LayerNorm(8)

    def forward(self, q):
        return self.block(q) if self.whole else checkpoint(self.block, q, use_reentrant=False)

    def block(self, q):
        q = self.norm(q)
        return self.attention(q, q, q)


@pytest.mark.parametrize("whole", [True, False])
def test_kernels_are_named_by_the_module_that_called_them(whole):
    """Layers of a list share a site, and recomputation in the backward pass adds none."""
    model = nn.Sequential()
    model.add_module("vision", Tower(F.scaled_dot_product_attention, whole=whole))
    model.add_module("backbone", Tower(eager, whole=whole))
    site = CallSite(model)
    kernels = KernelNames(site)
    with site, OperationDispatchMode(kernels):
        model(torch.randn(1, 2, 4, 8, requires_grad=True)).sum().backward()
    assert kernels.attention == "sdpa:flash_cpu+eager"
    assert kernels.sites == {"vision.layers.*": ["sdpa:flash_cpu"], "backbone.layers.*": ["eager"]}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    """Three layers, of which the first `recomputed` are checkpointed."""

    def __init__(self, recomputed, *, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.recomputed, self.reentrant = recomputed, reentrant

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if index < self.recomputed else layer(x)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recomputed", [0, 2, 3])
def test_units_that_run_again_in_backward_are_counted(recomputed, reentrant):
    model = Model(recomputed, reentrant=reentrant)
    with Recomputation(model, (Layer,)) as recomputation:
        for _ in range(4):  # accumulation runs every unit four times; that is no recomputation
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert recomputation.units == recomputed


def test_a_unit_that_recomputes_a_part_of_itself_counts():
    class Partly(Layer):
        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=False)

    model = nn.Sequential(Partly(), Partly())
    with Recomputation(model, (Partly,)) as recomputation:
        model(torch.ones(2, 4)).sum().backward()
    assert recomputation.units == 2
