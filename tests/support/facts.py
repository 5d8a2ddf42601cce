"""Facts as an observer would give them, made by hand: of a training with nothing wrong, to be changed in one place."""

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
    UpdateStatistics,
    PreparedByAccelerate,
    RankFacts,
    Scaler,
    Schedule,
    Setup,
    StateLoad,
    StepFacts,
    SteppedTensor,
)

WEIGHT, NORM = "backbone.weight", "norm.weight"
MOMENTS = {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
KAHAN = {"compensation": "Kahan buffer kahan_comp"}
STOCHASTIC = {"compensation": "stochastic rounding"}
FEW = {"elements": 32, "shape": (32,)}
HALF_MOMENTS = {"step": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}


def numbers(**changes: Any) -> UpdateStatistics:
    """Of a tensor that was resumed after ten steps and takes every update."""
    held = {
        "steps": 3,
        "updates": 3000,
        "updates_lost": 0,
        "update_squared": 3e-3,  # root mean square of an update: 1e-3
        "update_dot": 3e-3,
        "gradient_squared": 0.25,
        "second_moment_zero": 0.0,
        "steps_before": 10,
        "bf16_valued": {"weight": 0.001, "exp_avg": 0.0, "exp_avg_sq": 0.0},
        "live_differs_first": 0.0,
        "live_differs": 0.0,
    }
    return UpdateStatistics(**(held | changes))


def tensor(name: str = WEIGHT, **changes: Any) -> SteppedTensor:
    """A float32 master of a bfloat16 matrix. Changes that `Numbers` has go there."""
    own = {key: changes.pop(key) for key in list(changes) if key in UpdateStatistics.__dataclass_fields__}
    held = {
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
        "numbers": numbers(**own),
    }
    return SteppedTensor(name=name, **(held | changes))


def half(name: str = WEIGHT, **changes: Any) -> SteppedTensor:
    """A bfloat16 matrix that is stepped itself, by an optimizer with float32 state."""
    return tensor(name, **({"dtype": "bfloat16", "live": True, "gradient_dtype": "bfloat16"} | changes))


def orphan(**changes: Any) -> SteppedTensor:
    """A tensor that is stepped and stands for no parameter that anybody knows."""
    return tensor("AdamW parameter 0", **({"live_dtype": None, "live_device": None} | changes))


def live(name: str = WEIGHT, **changes: Any) -> LiveTensor:
    held = {"dtype": "bfloat16", "device": "cpu", "elements": 1000, "ndim": 2, "trainable": True, "linked": True}
    return LiveTensor(name=name, **(held | changes))


def buffer(name: str, dtype: str) -> LiveTensor:
    return LiveTensor(name=name, dtype=dtype, device="cpu", elements=16, ndim=1)


def course(step: int, **changes: Any) -> StepFacts:
    """A step at the rate that its schedule gives."""
    held = {
        "micro_batches": 1,
        "rates": {"AdamW": (1e-3 / step,)},
        "schedule_rates": {"LambdaLR": (1e-3 / step,)},
        "schedule_steps": {"LambdaLR": step},
        "reported_norm": 2.0,
        "max_norm": 1.0,
        "stepped_norm": 0.5,
    }
    return StepFacts(step=step, **(held | changes))


def courses(count: int = 6, **changes: Any) -> tuple[StepFacts, ...]:
    """Steps; a change that can be called is given the number of the step."""
    return tuple(
        course(step, **{key: value(step) if callable(value) else value for key, value in changes.items()})
        for step in range(1, count + 1)
    )


def rank(number: int = 0, **changes: Any) -> RankFacts:
    """One of two ranks. What is a rule's to see was seen, and is as it should be."""
    held = {
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
        "steps": courses(),
        "schedules": (Schedule(name="LambdaLR", optimizer="AdamW", reaches=True),),
        "scaler": None,
        "products": {"bfloat16": 40, "float32": 4},
        "autocast": Autocast(active=True, dtype="bfloat16"),
        "loads": (StateLoad(optimizer="AdamW", given=told(MOMENTS), held=told(MOMENTS)),),
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
    return RankFacts(rank=number, **(held | changes))


def ranks(**changes: Any) -> list[RankFacts]:
    """Two ranks that saw the same."""
    return [rank(0, **changes), rank(1, **changes)]


def stepping(*tensors: SteppedTensor, **changes: Any) -> list[RankFacts]:
    """Two ranks whose optimizer updates these tensors, and of which nothing was declared."""
    return ranks(**({"stepped": tensors, "contract": None} | changes))


def told(state: dict[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: (dtype,) for name, dtype in state.items()}


def loading(**changes: dict[str, tuple[str, ...]]) -> list[RankFacts]:
    """Two ranks that loaded optimizer state: `given`, `held`, `before`."""
    load = StateLoad(optimizer="AdamW", given=told(MOMENTS), held=told(MOMENTS))
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
    return stepping(half(update_dot=3e-3 * share, updates_lost=int(3000 * (1 - share)), **changes))


def moments(**dtypes: str) -> dict[str, Any]:
    return {"state": MOMENTS | dtypes}


def schedules(*names: str, reaches: bool | None = True) -> tuple[Schedule, ...]:
    return tuple(Schedule(name=name, optimizer="AdamW", reaches=reaches) for name in names)


def flattened(**changes: Any) -> list[RankFacts]:
    """Two ranks of a sharded model whose matrices are flat and not decayed."""
    return stepping(tensor(shape=(1000,), weight_decay=0.0), **changes)
