"""AdamW over masters in one compiled pass gives the bits of torch's fused kernel."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from benchbox.measure.memory import TensorStorageTracker
from benchbox.optim import MasterWeightOptimizer, one_pass, passes, squared_norm
from benchbox.optim.native import library
from tests.support.native_pairs import OPTIONS, assert_same, gradients, needs_compiler, pair, step_both

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def native_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tensors in each compiled step, without the trial step before the first one."""
    counts: list[int] = []
    functions = library()
    assert functions is not None
    watching = *_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()
    assert not watching, "a previous test left a hook, and an optimizer with hooks steps as torch does"
    assert one_pass._matches_torch(functions)
    through: Callable[..., None] = passes.step_adamw

    def counted(functions: Any, steps: Any) -> None:
        counts.append(len(steps))
        through(functions, steps)

    monkeypatch.setattr("benchbox.optim.one_pass.step_adamw", counted)
    return counts


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size", "threads")
@pytest.mark.parametrize("clip", [1e9, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.95, 0.98)])
def test_steps_are_those_of_torchs_fused_adamw_bit_for_bit(
    native_counts: list[int], clip: float, betas: tuple[float, float]
) -> None:
    """Over several steps and a change of the rate. Sizes that are no whole vectors are left to torch, beside the others."""
    optimizers = pair(betas=betas)
    for step in range(5):
        for group in (*optimizers[0].param_groups, *optimizers[2].param_groups):
            group["lr"] *= 0.9
        step_both(*optimizers, step, clip)
    assert_same(*optimizers)
    supported = [2, 2]  # of the three tensors of each group
    assert native_counts == supported * 4, "the first step makes the state, and is torch's"


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_adam_without_decay_is_stepped_so_too(native_counts: list[int]) -> None:
    optimizers = pair(kind=torch.optim.Adam, weight_decay=0.0)
    for step in range(3):
        step_both(*optimizers, step, 1.0)
    assert_same(*optimizers)
    assert native_counts == [2, 2] * 2


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"fused": False},
        {"betas": (0.3, 0.95)},
        {"kind": torch.optim.Adam},
        {"lr": torch.tensor(1e-3)},
    ],
    ids=["amsgrad", "maximize", "not fused", "small beta1", "coupled decay", "tensor rate"],
)
def test_what_the_pass_does_not_know_is_left_to_torch(native_counts: list[int], options: dict[str, Any]) -> None:
    """In the group that says so: of coupled decay and of a rate in a tensor the second group has none."""
    optimizers = pair(**options)
    for step in range(3):
        step_both(*optimizers, step, 1.0)
    assert_same(*optimizers)
    assert native_counts == ([2, 2] if {"kind", "lr"} & options.keys() else [])


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_who_watches_the_steps_of_masters_sees_them(native_counts: list[int]) -> None:
    """A hook must find scaled gradients on the masters, which one pass never makes."""
    ours, live, theirs, full = pair()
    hook_gradients: list[Tensor | None] = []
    for step in range(2):
        step_both(ours, live, theirs, full, step, 1.0)
    native_counts.clear()
    handle = ours.inner.register_step_pre_hook(lambda inner, *_: hook_gradients.append(inner.param_groups[0]["params"][0].grad))
    step_both(ours, live, theirs, full, 2, 1.0)
    handle.remove()
    assert native_counts == []
    assert hook_gradients
    assert all(gradient is not None for gradient in hook_gradients)
    assert_same(ours, live, theirs, full)


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_a_resumed_run_continues_bit_for_bit(native_counts: list[int]) -> None:
    straight, resumed = pair(), pair()
    for step in range(3):
        step_both(*straight, step, 1.0)
    file = io.BytesIO()
    torch.save(straight[0].state_dict(), file)
    file.seek(0)
    resumed[0].load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 5):
        step_both(*straight, step, 1.0)
        for parameter, gradient in zip(resumed[1], gradients(step), strict=True):
            parameter.grad = gradient
        resumed[0].clip_grad_norm_(1.0)
        resumed[0].step()
    assert native_counts
    assert all(torch.equal(*masters) for masters in zip(straight[0].masters, resumed[0].masters, strict=True))
    assert all(torch.equal(*live) for live in zip(straight[1], resumed[1], strict=True))


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_odd_values_round_as_torch_rounds_them(native_counts: list[int]) -> None:
    """NaN, infinities, denormals, ties and what overflows bfloat16, in masters and in gradients, to the last bit of a NaN."""
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-41, -1e-41, 3.4e38, 1.00390625, 1.01171875] * 2)
    cases = [(odd, torch.zeros(16)), (torch.ones(16), odd)]
    for start, drawn in cases:
        live, full = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16)), nn.Parameter(start.clone())
        options = OPTIONS | {"lr": 1e-3 if start is not odd else 0.0}
        ours = MasterWeightOptimizer([live], torch.optim.AdamW, masters=[start.clone()], **options)
        theirs = torch.optim.AdamW([full], **options)
        for _ in range(3):
            live.grad, full.grad = drawn.bfloat16(), drawn.bfloat16().float()
            ours.step()
            theirs.step()
        assert torch.equal(live.view(torch.int16), full.bfloat16().view(torch.int16))
        number = ~full.isnan()
        assert torch.equal(ours.masters[0].isnan(), ~number)
        assert torch.equal(ours.masters[0][number].view(torch.int32), full[number].view(torch.int32))
    assert native_counts == [1, 1] * len(cases)


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_a_backward_pass_over_weights_that_were_stepped_is_refused(native_counts: list[int]) -> None:
    """Autograd is told of the writing, as of torch's own: gradients of weights that are gone would be wrong without a word."""
    live = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([live], **OPTIONS)
    live.grad = torch.ones_like(live)
    optimizer.step()
    loss = (torch.ones(2, 16, dtype=torch.bfloat16, requires_grad=True) @ live).sum()
    optimizer.step()
    assert native_counts == [1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_gradients_laid_out_otherwise_are_left_to_torch_in_little_memory(native_counts: list[int]) -> None:
    """Each of the eight chunks of a transposed gradient comes from a copy of all of it; only one copy exists at a time."""
    shape = 4096, 2048
    live, full = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(shape))
    ours, theirs = MasterWeightOptimizer([live], **OPTIONS), torch.optim.AdamW([full], **OPTIONS)
    for step in range(2):
        drawn = torch.randn(*reversed(shape), generator=torch.Generator().manual_seed(step)).bfloat16()
        # Of a gradient that is not contiguous torch's fused kernel reads the wrong elements.
        live.grad, full.grad = drawn.T, drawn.T.float().contiguous()
        theirs.step()
        live_tensors = [live, drawn, *ours.masters, *(value for state in ours.state.values() for value in state.values())]
        with TensorStorageTracker(live_tensors) as tracker:
            ours.step()
    assert native_counts == []
    assert torch.equal(ours.masters[0], full)
    assert tracker.peak_bytes - sum(tensor.nbytes for tensor in live_tensors) < 4 * drawn.nbytes


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_parameters_of_several_chunks_are_those_of_torchs_fused_adamw_bit_for_bit(native_counts: list[int]) -> None:
    """The last chunk is a short one; each has its own place in the gradient and in the live weights."""
    shape, generator = (3, 2**20 - 2**16), torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    live, full = nn.Parameter(start.bfloat16()), nn.Parameter(start.clone())
    ours = MasterWeightOptimizer([live], torch.optim.AdamW, masters=[start.clone()], **OPTIONS)
    theirs = torch.optim.AdamW([full], **OPTIONS)
    for _ in range(3):
        live.grad = torch.randn(shape, generator=generator).bfloat16()
        full.grad = live.grad.float()
        ours.step()
        theirs.step()
    assert native_counts == [3, 3]
    assert torch.equal(ours.masters[0], full)
    assert torch.equal(live, full.bfloat16())


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
@pytest.mark.parametrize("start", [torch.ones(64, 32), torch.ones(32, 64).bfloat16().T], ids=["float32", "transposed"])
def test_live_weights_of_another_dtype_or_layout_are_left_to_torch(native_counts: list[int], start: Tensor) -> None:
    live, full = nn.Parameter(start.clone()), nn.Parameter(start.float().contiguous())
    ours, theirs = MasterWeightOptimizer([live], **OPTIONS), torch.optim.AdamW([full], **OPTIONS)
    for step in range(3):
        full.grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).bfloat16().float()
        live.grad = full.grad.to(start.dtype)
        ours.step()
        theirs.step()
    assert native_counts == []
    assert torch.equal(ours.masters[0], full)
    assert torch.equal(live, full.to(start.dtype))


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_moments_of_another_dtype_are_left_to_torch_which_refuses_them(native_counts: list[int]) -> None:
    """Read as float32 they would be numbers of nothing, and the last ones beyond the end of their memory."""
    live = nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([live], **OPTIONS)
    live.grad = torch.ones_like(live)
    optimizer.step()
    state = optimizer.state[optimizer.masters[0]]
    state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    with pytest.raises(RuntimeError, match="expected scalar type Float"):
        optimizer.step()
    assert native_counts == []


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_a_pass_that_rounds_otherwise_than_this_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, native_counts: list[int]
) -> None:
    """Tried once, before the first step: which operations are fused, the build of torch decides."""
    one_pass._matches_torch.cache_clear()
    through = one_pass.step_adamw

    def off_by_a_bit(functions: Any, jobs: Any) -> None:
        for job in jobs:
            job.step_size *= 1 + 2**-20
        through(functions, jobs)

    monkeypatch.setattr(one_pass, "step_adamw", off_by_a_bit)
    optimizers = pair()
    for step in range(3):
        step_both(*optimizers, step, 1.0)
    one_pass._matches_torch.cache_clear()
    assert native_counts == [1], "the trial"
    assert_same(*optimizers)


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size", "threads")
def test_the_norm_is_that_of_float64_and_does_not_depend_on_threads() -> None:
    """Within 1e-6, of equal elements too, whose sum is where few accumulators go wrong, and of large ones before small ones,
    which a long row would round away.
    """
    equal = torch.full((2**21,), 0.37, dtype=torch.bfloat16)
    ahead = torch.where(torch.arange(2**21) % 2048 < 32, 999.0, 0.731).bfloat16()
    for values in (gradients(0), [equal], [ahead]):
        exact = sum(value.double().square().sum().item() for value in values)
        assert squared_norm(values, torch.device("cpu")).item() == pytest.approx(exact, rel=1e-6)
    torch.set_num_threads(1)
    alone = squared_norm(gradients(3), torch.device("cpu"))
    torch.set_num_threads(2)
    assert torch.equal(squared_norm(gradients(3), torch.device("cpu")), alone)


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_the_norm_of_a_gradient_that_is_still_being_reduced_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a tensor, as a sharded gradient may hold, has no memory of its own: torch's kernels know where it is."""
    plain = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = squared_norm([plain], torch.device("cpu"))
    waiting = AsyncCollectiveTensor(plain)
    monkeypatch.setattr("benchbox.optim.norm.sum_of_squares", lambda *_: pytest.fail("read at its address"))
    squared = squared_norm([waiting], torch.device("cpu"))
    assert squared.item() == pytest.approx(expected.item(), rel=1e-6)


def test_small_policies_do_not_pay_for_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchbox.optim.passes.library", lambda: pytest.fail("compiled"))
    optimizers = pair()
    for step in range(2):
        step_both(*optimizers, step, 1.0)
    assert_same(*optimizers)


@needs_compiler
@pytest.mark.usefixtures("native_at_any_size")
def test_compiled_passes_tell_listeners_the_tensors_that_they_read_and_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatch mode does not see the passes: 2 bytes per parameter for the norm, 28 for the step."""
    parameter = nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = MasterWeightOptimizer([parameter], torch.optim.AdamW, fused=True)
    counted: list[int] = []
    listener = lambda read, written: counted.append(sum(tensor.nbytes for tensor in (*read, *written)))  # noqa: E731
    for listeners in ([], [], [listener]):  # torch creates the state in the first step, and the second one begins with a trial
        monkeypatch.setattr(passes, "pass_listeners", listeners)
        parameter.grad = torch.randn(64, 64).bfloat16()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert counted == [2 * 64 * 64, 28 * 64 * 64]
