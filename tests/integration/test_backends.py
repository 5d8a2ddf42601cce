"""All backends take the same steps."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.audit.judge import judge
from benchbox.estimation import Estimator
from benchbox.observer.facts import RankFacts
from benchbox.observer.stepped_tensors import all_stepped_tensors
from benchbox.registry.backends import backends
from benchbox.registry.recipes import recipe_by_name
from benchbox.spec.cell import Cell, OptimSpec
from tests.support.ranks import CellRun, run_cells, tiny_cell
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.ranks

STEPS = 6
# Recipes in which the audit finds nothing.
UNALARMED = ("fp32", "fp32_autocast", "bf16_master")
TWO_RANKS = ("ddp", "fsdp1_full", "fsdp1_grad_op", "fsdp2", "zero1", "zero2", "zero3")
HYBRIDS = ("fsdp1_hybrid", "fsdp1_hybrid_grad_op")
RANKS = {"single": 1, "hsdp": 4} | dict.fromkeys(TWO_RANKS, 2) | dict.fromkeys(HYBRIDS, 4)
# Those of a group share processes.
GROUPS = (("single",), TWO_RANKS[:4], TWO_RANKS[4:], ("hsdp", *HYBRIDS))
# By default one backend of each family runs every recipe, those that are another's class with another flag fp32 alone, and the
# others fp32 and bf16_master.
EVERY_RECIPE = ("single", "fsdp2", "zero2")
ONLY_FP32 = ("fsdp1_grad_op", "zero1", *HYBRIDS)
# torch's default beta2, at which a bfloat16 second moment cannot decay
SLOW_DECAY = OptimSpec(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)


def recipes_of(backend: str) -> tuple[str, ...]:
    """Return the recipes that are run: a hybrid is FSDP1's code in other groups, and four ranks take long."""
    return ("fp32", "bf16_master") if backend in HYBRIDS else backends()[backend].recipes


def shape_of(backend: str, recipe: str) -> str:
    """Return batch x accumulation of the cell that is observed.

    A global batch of four; in float32 four on each rank, so that the cell is also what accumulation over four equals.
    """
    return "4x1" if recipe == "fp32" else f"{4 // RANKS[backend]}x1"


def is_default(backend: str, recipe: str) -> bool:
    """Return whether this recipe runs on this backend without `--exhaustive`."""
    return backend in EVERY_RECIPE or recipe == "fp32" or (recipe == "bf16_master" and backend not in ONLY_FP32)


def split_steps_of(backend: str) -> int:
    """Return the number of accumulated steps. What the first leaves behind is in the gradient norm of the second, in which DDP
    tells ranks once in what order gradients came: its collectives are counted in a third."""
    return 3 if backend == "ddp" else 2


RUN = [(backend, recipe) for backend in RANKS for recipe in recipes_of(backend)]


def by_tier(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    return in_tiers(pairs, lambda pair: is_default(*pair))


class Results(dict[tuple[str, str, str], dict[str, Any]]):
    """(backend, recipe, batch x accumulation) -> the result of rank 0. Backends of a group run when one is first asked for."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory, *, exhaustive: bool) -> None:
        super().__init__()
        self._tmp_path_factory = tmp_path_factory
        self._exhaustive = exhaustive

    def recipes_of(self, backend: str) -> list[str]:
        """Return the recipes that this test run needs."""
        return [recipe for recipe in recipes_of(backend) if self._exhaustive or is_default(backend, recipe)]

    def reduced_in(self, backend: str) -> list[tuple[str, str]]:
        """Return the recipe for each dtype that gradients are reduced in, and the dtype, as far as this test run needs them."""
        recipes = (("fp32", "float32"), ("bf16_master", "bfloat16"))
        return [(recipe, dtype) for recipe, dtype in recipes if recipe in self.recipes_of(backend)]

    def __missing__(self, key: tuple[str, str, str]) -> dict[str, Any]:
        self._run(next(group for group in GROUPS if key[0] in group))
        return dict.__getitem__(self, key)

    def _run(self, group: tuple[str, ...]) -> None:
        (ranks,) = {RANKS[backend] for backend in group}
        runs: list[CellRun] = []
        for backend in group:
            setup: dict[str, Any] = {"backend": backend, "world_size": ranks}
            for recipe in self.recipes_of(backend):
                batch = int(shape_of(backend, recipe).partition("x")[0])
                runs.append(CellRun(tiny_cell(**setup, batch=batch, recipe=recipe), STEPS, "facts"))
            accumulating = tiny_cell(**setup, batch=1, accumulation=4, recipe="fp32")
            runs.append(CellRun(accumulating, split_steps_of(backend), "collectives"))
            if "bf16_pure" in self.recipes_of(backend):
                slow = tiny_cell(**setup, batch=4 // ranks, recipe="bf16_pure", optim=SLOW_DECAY)
                runs.append(CellRun(slow, STEPS, "facts"))
            if backend == "single":  # the global batches of several ranks
                runs += [CellRun(tiny_cell(**setup, batch=batch, recipe="fp32"), STEPS) for batch in (8, 16)]
        folder = self._tmp_path_factory.mktemp(group[0])
        for result in run_cells(runs, folder):
            cell = result["cell"]
            split = f"{cell['batch']}x{cell['accumulation']}"
            if cell["recipe"] == "fp32":
                result["gradient"] = torch.load(folder / f"{result['index']}.pt", weights_only=True)
            files = [folder / f"{result['index']}-facts-{rank}.json" for rank in range(ranks)]
            result["facts"] = [RankFacts.from_dict(json.loads(file.read_text())) for file in files if file.exists()]
            slow = cell["optim"]["betas"][1] == SLOW_DECAY.betas[1]
            self[cell["backend"], cell["recipe"], "0.999" if slow else split] = result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Results:
    return Results(tmp_path_factory, exhaustive=exhaustive)


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator()


def test_every_backend_is_covered() -> None:
    """The table above names every backend there is."""
    assert set(RANKS) == {name for name in backends() if backends()[name].target.startswith("benchbox.")}


@pytest.mark.parametrize("backend", RANKS)
def test_what_runs_is_what_was_asked_for(results: Results, backend: str) -> None:
    """Observed from live objects, each backend is itself, over its ranks, and holds its share."""
    ranks = RANKS[backend]
    for recipe in results.recipes_of(backend):
        observed = results[backend, recipe, shape_of(backend, recipe)]["observed"]
        assert observed["backend"] == backend
        assert observed["world_size"] == ranks
        sharded_over = {"single": 1, "ddp": 1, "hsdp": 2, **dict.fromkeys(HYBRIDS, 2)}.get(backend, ranks)
        share = observed["shard_numel"] / observed["total_numel"]
        assert share == pytest.approx(1 / sharded_over, rel=0.02)


@pytest.mark.parametrize(("backend", "strategy"), zip(HYBRIDS, ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), strict=True))
def test_a_hybrid_says_what_it_shards_over_and_how_many_copies_there_are(results: dict, backend: str, strategy: str) -> None:
    """Read from the groups in use."""
    sharding = results[backend, "fp32", "4x1"]["observed"]["sharding"]
    assert sharding.startswith(f"{strategy} over 2 ranks, 2 copies in ")


# Of bf16_master on a CPU. Sizes of buckets depend on the policy.
SETTINGS: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"find_unused_parameters": False, "static_graph": False, "gradient_as_bucket_view": True, "comm_hook": None},
    "fsdp1_full": {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False, "limit_all_gathers": True},
    "fsdp1_grad_op": {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False, "limit_all_gathers": True},
    **{name: {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False, "limit_all_gathers": True} for name in HYBRIDS},
    "fsdp2": {"reshard_after_backward": True, "explicit_backward_prefetch": False, "param_dtype": "bfloat16"},
    "hsdp": {"reshard_after_backward": True, "explicit_backward_prefetch": False, "param_dtype": "bfloat16"},
    "zero1": {"overlap_comm": False, "reduce_scatter": True, "cpu_offload": False},
    "zero2": {"overlap_comm": False, "reduce_scatter": True, "cpu_offload": False},
    "zero3": {"overlap_comm": True, "memory_efficient_linear": True, "max_live_parameters": 1_000_000_000},
}


@pytest.mark.parametrize("backend", RANKS)
def test_settings_that_tilt_a_comparison_are_observed(results: Results, backend: str) -> None:
    """Every backend shows its own, and the dtype that gradients are reduced in follows the recipe."""
    for recipe, dtype in results.reduced_in(backend):
        settings = results[backend, recipe, shape_of(backend, recipe)]["observed"]["settings"]
        assert settings.get("reduce_dtype") == (None if backend == "single" else dtype)
        assert settings["optimizer_fused"] is True
        if backend in ("zero1", "zero2"):  # of ZeRO in 16 bits alone
            assert settings["check_grad_overflow"] is (recipe_by_name(recipe).storage == "bfloat16")
    assert {name: settings[name] for name in SETTINGS[backend]} == SETTINGS[backend]
    assert all(size > 0 for name, size in settings.items() if "bucket" in name and name.endswith(("size", "cap")))


@pytest.mark.parametrize(("backend", "recipe"), by_tier(pair for pair in RUN if pair[0] != "single"))
def test_steps_agree_with_one_process(results: dict, backend: str, recipe: str) -> None:
    """With the same seed and the same global batch, losses and gradient norms of every backend equal those of one process, step
    by step: within 2% in any recipe, within 0.01% in float32."""
    reference = results["single", recipe, f"{4 * RANKS[backend]}x1" if recipe == "fp32" else "4x1"]
    result = results[backend, recipe, shape_of(backend, recipe)]
    tolerance = 1e-4 if recipe == "fp32" else 0.02
    for series in ("loss", "grad_norm"):
        assert len(result[series]) == STEPS
        for step, (value, wanted) in enumerate(zip(result[series], reference[series], strict=True)):
            assert value == pytest.approx(wanted, rel=tolerance), f"{series} of step {step}"


@pytest.mark.parametrize(
    ("backend", "tolerance"),
    in_tiers([("zero1", 1e-5), ("zero2", 1e-5), ("zero3", 4e-5)], lambda case: is_default(case[0], "bf16_master")),
)
def test_masters_of_zero_start_where_those_of_ddp_do(results: dict, backend: str, tolerance: float) -> None:
    """Under `bf16_master` the losses of five steps agree. With masters from rounded weights they differ by 6e-5, under ZeRO-3
    by 8e-5: its linear function rounds a product before it adds the bias."""
    losses, wanted = (results[name, "bf16_master", "2x1"]["loss"][:5] for name in (backend, "ddp"))
    assert losses == pytest.approx(wanted, rel=tolerance)


def test_the_steps_are_not_all_the_same(results: dict) -> None:
    """The agreement above compares something: losses move, and the norm is large enough for clipping to matter."""
    reference = results["single", "fp32", "4x1"]
    assert len({round(loss, 3) for loss in reference["loss"]}) == STEPS
    assert min(reference["grad_norm"]) > 1.0


@pytest.mark.parametrize("backend", RANKS)
def test_accumulating_four_gives_the_gradient_of_a_batch_of_four(results: dict, backend: str) -> None:
    """Four micro-batches of one sample give, parameter by parameter, the gradient of one batch of the same four; and the steps
    that follow agree as well, so nothing of one step is left in the next."""
    one_batch = results[backend, "fp32", "4x1"]
    split = results[backend, "fp32", "1x4"]
    assert one_batch["samples"] == split["samples"] == 4
    assert one_batch["gradient"].keys() == split["gradient"].keys()
    for name, wanted in one_batch["gradient"].items():
        assert torch.allclose(split["gradient"][name], wanted, rtol=1e-4, atol=1e-6), name
    for step in range(split_steps_of(backend)):
        for series in ("loss", "grad_norm"):
            assert split[series][step] == pytest.approx(one_batch[series][step], rel=1e-4), f"{series} of step {step}"
    norm = torch.stack([gradient.norm() for gradient in one_batch["gradient"].values()]).norm().item()
    assert one_batch["grad_norm"][0] == pytest.approx(norm, rel=1e-4), "the reported norm is that of the gradient"


@pytest.mark.parametrize("backend", ["ddp", "fsdp1_full", "fsdp1_grad_op", "fsdp2", "hsdp", "zero1", *HYBRIDS])
def test_gradients_travel_once_a_step_however_many_micro_batches(results: dict, backend: str) -> None:
    """A backend that can accumulate locally does so: four micro-batches reduce as many gradient bytes as one."""
    one_batch, split = (results[backend, "fp32", shape]["reduced_bytes"] for shape in ("4x1", "1x4"))
    assert split == one_batch > 0


@pytest.mark.parametrize("split", ["4x1", "1x4"])
@pytest.mark.parametrize("backend", [backend for backend, ranks in RANKS.items() if ranks > 1])
def test_theory_predicts_every_collective_to_the_byte(results: dict, estimator: Estimator, backend: str, split: str) -> None:
    """Calls and bytes, with and without accumulation, on two ranks and on four."""
    result = results[backend, "fp32", split]
    assert estimator.estimate(Cell.from_dict(result["cell"])).collectives == result["collectives"]


@pytest.mark.parametrize("backend", RANKS)
def test_theory_predicts_the_peak_memory_of_a_step_that_accumulates(results: dict, estimator: Estimator, backend: str) -> None:
    """Gradients of earlier micro-steps lie beside the activations of the last one, in buckets, shards or neither."""
    result = results[backend, "fp32", "1x4"]
    assert estimator.estimate(Cell.from_dict(result["cell"])).peak_bytes == pytest.approx(result["peak_bytes"], rel=0.02)


@pytest.mark.parametrize("backend", RANKS)
def test_the_schedule_advances_once_a_step(results: Results, backend: str) -> None:
    """The rate in force at step k is the schedule's at k in every group, and accumulation does not make it run four times as
    fast."""
    wanted = [1e-3 * min(1.0, (step + 1) / 5) for step in range(STEPS)]
    recipes = results.recipes_of(backend)
    own_optimizer = [recipe for recipe in recipes if recipe == "bf16_master" or recipe_by_name(recipe).compensation]
    for recipe, split in [(recipe, shape_of(backend, recipe)) for recipe in own_optimizer] + [("fp32", "1x4")]:
        for step, rates in enumerate(results[backend, recipe, split]["lr"]):
            assert rates == pytest.approx([wanted[step]] * 4), f"{recipe} {split}, step {step}"


@pytest.mark.parametrize(("backend", "recipe"), by_tier(RUN))
def test_the_optimizer_steps_what_the_recipe_says(results: dict, backend: str, recipe: str) -> None:
    """Weights and moments have the declared dtype, on every rank. `bf16_naive` declares none: the same cast is wrong where
    nothing keeps masters and right where DeepSpeed does, or where accelerate upcasts what it shards."""
    stepped = [tensor for _, tensor in all_stepped_tensors(results[backend, recipe, shape_of(backend, recipe)]["facts"])]
    keeps_masters = backend not in ("single", "ddp")
    wanted = recipe_by_name(recipe).stepped or ("float32" if keeps_masters else "bfloat16")
    assert {tensor.dtype for tensor in stepped} == {wanted}
    assert {tensor.state[moment] for tensor in stepped for moment in ("exp_avg", "exp_avg_sq")} == {wanted}


@pytest.mark.parametrize(("backend", "recipe"), by_tier(pair for pair in RUN if pair[1] in UNALARMED))
def test_the_audit_raises_no_false_alarm(results: dict, backend: str, recipe: str) -> None:
    """Every rule is judged but those on averages and loading, and none fires: gradients in bfloat16 are a note."""
    judgement = judge(results[backend, recipe, shape_of(backend, recipe)]["facts"])
    assert [finding for finding in judgement.findings if finding.severity != "info"] == []
    assert judgement.not_judged == {
        "BXP107": "no average of the weights was searched for",
        "BXP503": "no optimizer state was loaded",
    }


@pytest.mark.parametrize("backend", [name for name in RANKS if name != "single"])
def test_the_census_holds_what_is_computed_and_reduced_in(results: Results, backend: str) -> None:
    """Beside what is stored: matrix products and reductions of gradients, in float32 and in bfloat16."""
    for recipe, dtype in results.reduced_in(backend):
        for facts in results[backend, recipe, shape_of(backend, recipe)]["facts"]:
            tensors: Counter[tuple[str, str]] = Counter()
            elements: Counter[tuple[str, str]] = Counter()
            for entry in facts.entries:  # several of one kind: gradients are reduced, and so is the loss
                tensors[entry.kind, entry.dtype] += entry.tensors
                elements[entry.kind, entry.dtype] += entry.elements
            assert tensors["product", dtype] > 50
            assert elements["reduction", dtype] > 100_000


@pytest.mark.parametrize("backend", in_tiers((name for name in RANKS if name not in HYBRIDS), EVERY_RECIPE.__contains__))
def test_the_audit_finds_pure_bfloat16_on_every_backend(results: dict, backend: str) -> None:
    """With any sharding: 16-bit tensors are stepped, updates are lost, at beta2 0.999 most of them, and v stalls there.

    The optimizers are fused: they round decay and update once, so that no decay is lost by itself.
    """
    of_fast, of_slow = (results[backend, "bf16_pure", key]["facts"] for key in (f"{4 // RANKS[backend]}x1", "0.999"))
    fast, slow = ({finding.code for finding in judge(facts).findings} for facts in (of_fast, of_slow))
    for facts, codes, least in ((of_fast, fast, 0.05), (of_slow, slow, 0.5)):
        stepped = [tensor for rank in facts for tensor in rank.stepped]
        assert all(tensor.fused for tensor in stepped)
        lost = sum(tensor.numbers.updates_lost for tensor in stepped) / sum(tensor.numbers.updates for tensor in stepped)
        assert lost > least
        assert "BXP101" in codes
        assert "BXP106" not in codes
    assert "BXP102" in slow
    assert "BXP201" not in fast
    assert "BXP201" in slow


@pytest.mark.parametrize("backend", [name for name in RANKS if RANKS[name] == 2])
def test_gradients_of_sharding_backends_are_those_of_ddp(results: dict, backend: str) -> None:
    """Sharding and reduction differ; the gradient does not."""
    for name, wanted in results["ddp", "fp32", "4x1"]["gradient"].items():
        assert torch.allclose(results[backend, "fp32", "4x1"]["gradient"][name], wanted, rtol=1e-4, atol=1e-6), name
