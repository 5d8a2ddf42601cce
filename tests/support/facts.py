"""Facts of a healthy training, made by hand as an observer would record them; each test changes one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchbox.observer.facts import (
    Autocast,
    CensusEntry,
    CollectiveUse,
    ConfiguredReduction,
    Contract,
    LiveTensor,
    PreparedByAccelerate,
    RankFacts,
    Scaler,
    Schedule,
    Setup,
    StateLoad,
    StepFacts,
    SteppedTensor,
    UpdateStatistics,
    WeightAverage,
)

WEIGHT, NORM = "backbone.weight", "norm.weight"
MOMENTS = {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
KAHAN = {"compensation": "Kahan buffer kahan_comp"}
STOCHASTIC = {"compensation": "stochastic rounding"}
FEW = {"elements": 32, "shape": (32,)}
HALF_MOMENTS = {"step": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}


def update_statistics(**changes: Any) -> UpdateStatistics:
    """Return the statistics of a tensor that was resumed after ten steps and takes every update."""
    values = {
        "steps": 3,
        "updates": 3000,
        "updates_lost": 0,
        "update_squared": 3e-3,  # root mean square of an update: 1e-3
        "update_dot": 3e-3,
        "gradient_squared": 0.25,
        "second_moment_zero": 0.0,
        "steps_before": 10,
        "bf16_valued": {"weight": 0.001, "exp_avg": 0.0, "exp_avg_sq": 0.0},
        "steps_before_later": 15,
        "bf16_valued_later": {"weight": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0},
        "live_differs_first": 0.0,
        "live_differs": 0.0,
        "digest_before": "5eed",
        "digest_after": "cafe",
    }
    return UpdateStatistics(**(values | changes))


def tensor(name: str = WEIGHT, **changes: Any) -> SteppedTensor:
    """Return a float32 master of a bfloat16 matrix. Changes of fields of `UpdateStatistics` are made there."""
    statistics = {key: changes.pop(key) for key in list(changes) if key in UpdateStatistics.__dataclass_fields__}
    values = {
        "optimizer": "AdamW",
        "dtype": "float32",
        "device": "cpu",
        "shape": (40, 25),
        "elements": 1000,
        "live": False,
        "live_dtype": "bfloat16",
        "live_device": "cpu",
        "live_ndim": 2,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decoupled_decay": True,
        "gradient_dtype": "float32",
        "state": MOMENTS,
        "state_devices": {"exp_avg": "cpu", "exp_avg_sq": "cpu"},
        "step_count": 16.0,
        "numbers": update_statistics(**statistics),
    }
    return SteppedTensor(name=name, **(values | changes))


def half(name: str = WEIGHT, **changes: Any) -> SteppedTensor:
    """Return a bfloat16 matrix that is stepped itself, by an optimizer with float32 state."""
    return tensor(name, **({"dtype": "bfloat16", "live": True, "gradient_dtype": "bfloat16"} | changes))


def unlinked(**changes: Any) -> SteppedTensor:
    """Return a stepped tensor that stands for no known parameter."""
    return tensor("AdamW parameter 0", **({"live_dtype": None, "live_device": None} | changes))


def live(name: str = WEIGHT, **changes: Any) -> LiveTensor:
    values = {"dtype": "bfloat16", "device": "cpu", "elements": 1000, "ndim": 2, "trainable": True, "linked": True}
    return LiveTensor(name=name, **(values | changes))


def frozen(name: str, ndim: int | None = 1) -> LiveTensor:
    """Return a bfloat16 parameter that is not trained."""
    return live(name, trainable=False, linked=False, ndim=ndim)


def buffer(name: str, dtype: str) -> LiveTensor:
    return LiveTensor(name=name, dtype=dtype, device="cpu", elements=16, ndim=1)


def average(**changes: Any) -> WeightAverage:
    """Return an average that was written to for eleven steps, and in which most elements that lag stayed as they were."""
    values = {"name": "EMA", "parameter": WEIGHT, "dtype": "bfloat16", "elements": 1000, "lagging": 800, "stuck": 700}
    return WeightAverage(**({**values, "written": True, "steps": 11} | changes))


def one_step_facts(step: int, **changes: Any) -> StepFacts:
    """Return a step at the rate of its schedule."""
    values = {
        "micro_batches": 1,
        "rates": {"AdamW": (1e-3 / step,)},
        "schedule_rates": {"LambdaLR": (1e-3 / step,)},
        "schedule_steps": {"LambdaLR": step},
        "reported_norm": 2.0,
        "max_norm": 1.0,
        "stepped_norm": 0.5,
    }
    return StepFacts(step=step, **(values | changes))


def step_facts(count: int = 6, **changes: Any) -> tuple[StepFacts, ...]:
    """Return `count` steps; a callable change is called with the number of the step."""
    return tuple(
        one_step_facts(step, **{key: value(step) if callable(value) else value for key, value in changes.items()})
        for step in range(1, count + 1)
    )


def rank(number: int = 0, **changes: Any) -> RankFacts:
    """Return one of two ranks with complete and healthy facts."""
    values = {
        "world_size": 2,
        "source": "command",
        "optimizer_chain": ("AcceleratedOptimizer", "AdamW"),
        "entries": (
            CensusEntry(rank=number, kind="master", dtype="float32", device="cpu", tensors=1, elements=1000, bytes=4000),
        ),
        "stepped": (tensor(),),
        "parameters": (live(),),
        "buffers": (buffer("rotary.inv_freq", "float32"),),
        "accumulated_in": ("float32",),
        "collectives": (reduction("float32"), reduction("float32", elements=1, operation="all_reduce")),
        "reduction": ConfiguredReduction(source="FSDP1 reduce_dtype", dtype="float32"),
        "steps": step_facts(),
        "schedules": (Schedule(name="LambdaLR", optimizer="AdamW", reaches=True),),
        "scaler": None,
        "products": {"bfloat16": 40, "float32": 4},
        "autocast": Autocast(active=True, dtype="bfloat16"),
        "loads": (StateLoad(optimizer="AdamW", given=single_dtypes(MOMENTS), held=single_dtypes(MOMENTS)),),
        "setup": Setup(
            backend="fsdp1_full",
            model_class="FullyShardedDataParallel",
            sharding="FULL_SHARD in 2 units",
            requested="fsdp",
            mixed_precision="bf16",
            source="accelerate",
        ),
        "prepared": PreparedByAccelerate(accumulation=1, wrapped=("AdamW",), unknown=()),
        "groups": ((0.1, 1), (0.0, 1)),
        "default_decay": 0.01,
        "default_dtype": "float32",
        "contract": Contract(source="recipe bf16_master", compute="bfloat16", stepped="float32", moments="float32"),
    }
    return RankFacts(rank=number, **(values | changes))


def ranks(**changes: Any) -> list[RankFacts]:
    """Return two ranks with the same facts."""
    return [rank(0, **changes), rank(1, **changes)]


def ranks_stepping(*tensors: SteppedTensor, **changes: Any) -> list[RankFacts]:
    """Return two ranks whose optimizer updates these tensors, without a contract."""
    return ranks(**({"stepped": tensors, "contract": None} | changes))


def replicas(*stepped: tuple[SteppedTensor, ...], **changes: Any) -> list[RankFacts]:
    """Return a rank for each tuple of tensors that its optimizer updates, without a contract."""
    return [rank(number, contract=None, stepped=tensors, **changes) for number, tensors in enumerate(stepped)]


def single_dtypes(state: dict[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: (dtype,) for name, dtype in state.items()}


def loading(**changes: dict[str, tuple[str, ...]]) -> list[RankFacts]:
    """Return two ranks that loaded optimizer state; changes are `given`, `held` or `before`."""
    load = StateLoad(optimizer="AdamW", given=single_dtypes(MOMENTS), held=single_dtypes(MOMENTS))
    return ranks(loads=(replace(load, **changes),))


def reduction(dtype: str, *, elements: int = 1000, operation: str = "reduce_scatter") -> CollectiveUse:
    return CollectiveUse(operation=operation, dtype=dtype, count=1, elements=elements, bytes=4 * elements)


def scaler(steps: int, skipped: int) -> Scaler:
    return Scaler(name="GradScaler", steps=steps, skipped=skipped)


def setup(backend: str, requested: str | None, mixed_precision: str | None = "bf16") -> Setup:
    return Setup(
        backend=backend,
        model_class="Model",
        sharding=None,
        requested=requested,
        mixed_precision=mixed_precision,
        source="accelerate",
    )


def edq(share: float, **changes: Any) -> list[RankFacts]:
    return ranks_stepping(half(update_dot=3e-3 * share, updates_lost=int(3000 * (1 - share)), **changes))


def moments(**dtypes: str) -> dict[str, Any]:
    return {"state": MOMENTS | dtypes}


def schedules(*names: str, reaches: bool | None = True) -> tuple[Schedule, ...]:
    return tuple(Schedule(name=name, optimizer="AdamW", reaches=reaches) for name in names)


def flattened(**changes: Any) -> list[RankFacts]:
    """Return two ranks of a sharded model with flat matrices that are not decayed."""
    return ranks_stepping(tensor(shape=(1000,), weight_decay=0.0), **changes)
