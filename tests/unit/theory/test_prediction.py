"""Memory and collectives by formula, of a policy of two layers whose figures are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.registry.backends import BUILT_IN_BACKENDS
from benchbox.theory.links import Link
from benchbox.theory.prediction import predict
from benchbox.theory.sharding import MODELS
from benchbox.theory.structure import CellSetup, Event, ParameterShape, Structure, Timeline

LAYERS = ("layer.0", "layer.1")
# Of 1024 elements in each of two layers, and 512 in the root; all train.
STRUCTURE = Structure(
    parameters=(
        ParameterShape(name="root", shape=(8, 64), trains=True, group=0),
        *(
            ParameterShape(name=f"{name}.weight", shape=(16, 64), trains=True, group=0, fsdp1_unit=name, fsdp2_unit=name)
            for name in LAYERS
        ),
    ),
    batch_bytes=100,
    layout={"": (0,), "layer.0": (1,), "layer.1": (2,)},
)
TIMELINE = Timeline(
    events=(
        Event("enter", name=""),
        *(
            event
            for name in LAYERS
            for event in (
                Event("enter", name=name),
                Event("allocate", 10**6),
                Event("leave", name=name),
            )
        ),
        Event("leave", name=""),
        Event("forward_end"),
        Event("enter_backward", name=""),
        Event("enter_backward", name="layer.1"),
        Event("free", 10**6),
        Event("gradient", 2),
        Event("enter_backward", name="layer.0"),
        Event("free", 10**6),
        Event("gradient", 1),
        Event("gradient", 0),
    ),
    model_flops=7,
)
NUMEL = 2560


def predicted(backend, world_size=2, **changes):
    setup = CellSetup(backend=backend, world_size=world_size, masters=backend in ("single", "ddp"))
    return predict(STRUCTURE, TIMELINE, replace(setup, **changes))


def test_every_built_in_backend_has_a_model():
    assert MODELS.keys() == BUILT_IN_BACKENDS.keys()


def test_adam_with_masters_takes_14_bytes_per_parameter_beside_gradients():
    """bf16 parameters 2, masters 4, moments 8: what the step keeps on a single process."""
    assert predicted("single", 1).resident_bytes == NUMEL * 14


@pytest.mark.parametrize("world_size", [2, 4, 1024])
def test_sharding_divides_what_stays_between_steps(world_size):
    """fp32 shards 4, moments 8. FSDP2 shards by rows, of which a layer has 16: more ranks than rows do not help."""
    assert predicted("fsdp1_full", world_size).resident_bytes == 12 * sum(-(-n // world_size) for n in (512, 1024, 1024))
    rows = sum(-(-rows // world_size) for rows in (8, 16, 16))
    assert predicted("fsdp2", world_size).resident_bytes == 12 * 64 * rows


def test_full_shard_gathers_layers_twice_and_the_root_once():
    full, grad_op = (predicted(name).collectives for name in ("fsdp1_full", "fsdp1_grad_op"))
    assert full["all_gather"] == {"count": 5, "bytes": 2 * (512 + 4 * 1024)}
    assert grad_op["all_gather"] == {"count": 3, "bytes": 2 * NUMEL}
    assert full["reduce_scatter"] == grad_op["reduce_scatter"] == {"count": 3, "bytes": 2 * NUMEL}


def test_a_layer_that_backward_does_not_reach_is_gathered_once():
    events = tuple(event for event in TIMELINE.events if (event.kind, event.name) != ("enter_backward", "layer.0"))
    timeline = replace(TIMELINE, events=tuple(event for event in events if event != Event("gradient", 1)))
    estimate = predict(STRUCTURE, timeline, CellSetup(backend="fsdp1_full", world_size=2))
    assert estimate.collectives["all_gather"]["count"] == 4
    assert estimate.collectives["reduce_scatter"]["count"] == 2


def test_a_unit_that_forward_calls_twice_and_checkpointing_repeats_is_gathered_each_time():
    """Twice in forward, for the repeated forward, and for backward: four times, and the other layer twice."""
    events = list(TIMELINE.events)
    events.insert(events.index(Event("enter", name="layer.1")), Event("enter", name="layer.0"))
    events.insert(events.index(Event("enter_backward", name="layer.0")), Event("enter_again", name="layer.0"))
    timeline = replace(TIMELINE, events=tuple(events))
    for backend, gathers in (("fsdp1_full", 1 + 4 + 2), ("fsdp1_grad_op", 3)):
        estimate = predict(STRUCTURE, timeline, CellSetup(backend=backend, world_size=2))
        assert estimate.collectives["all_gather"]["count"] == gathers


def test_a_hybrid_reduces_its_shards_over_the_replicas_too():
    sharded, hybrid = predicted("fsdp2"), predicted("hsdp", 4, shard_size=2)
    assert hybrid.collectives["all_gather"] == sharded.collectives["all_gather"]
    extra = hybrid.collectives["all_reduce"]["bytes"] - sharded.collectives["all_reduce"]["bytes"]
    assert extra == NUMEL * 2 // 2


@pytest.mark.parametrize("backend", ["hsdp", "fsdp1_hybrid"])
def test_a_hybrid_takes_the_time_of_rings_of_its_shards_and_of_its_replicas(backend):
    """16 ranks in groups of 2: half of what is gathered moves, not 15/16, and each shard is reduced over 8 replicas."""
    link = Link(name="made up", latency_s=0.0, bytes_per_s=1e9, base_s=0.0, source="made up")
    estimate = predicted(backend, 16, shard_size=2)
    gathered, scattered = (estimate.collectives[name]["bytes"] for name in ("all_gather", "reduce_scatter"))
    moved = (gathered + scattered) / 2 + 2 * 7 / 8 * NUMEL * 2 / 2
    assert estimate.communication_time_s(link) == pytest.approx(moved / 1e9, rel=0.01)  # and the mean loss, the gradient norm


@pytest.mark.parametrize(
    ("backend", "recipe", "expected"),
    [
        ("ddp", {}, 28),  # masters 8, moments 16, the bfloat16 gradient 2, the live weight 2
        ("ddp", {"live_size": 4, "masters": False}, 28),  # float32: the gradient 4, and no copy of the weight
        ("ddp", {"live_size": 2, "stepped_size": 2, "moment_size": 2, "masters": False}, 14),
        ("fsdp2", {}, 28),  # the gradient of a float32 shard 4
        ("ddp", {"averages": True}, 36),
    ],
)
def test_the_optimizer_moves_what_it_steps_the_gradient_and_the_copy_that_there_is(backend, recipe, expected):
    estimate = predicted(backend, **recipe)
    ranks = 2 if backend == "fsdp2" else 1
    assert estimate.optimizer_bytes == expected * NUMEL // ranks


@pytest.mark.parametrize(("backend", "factor"), [("ddp", 1), ("fsdp1_full", 1), ("zero1", 1), ("zero2", 4)])
def test_accumulation_repeats_the_reduction_of_zero2_only(backend, factor):
    def reduced(accumulation):
        traffic = predicted(backend, accumulation=accumulation).collectives
        return max(traffic.get(name, {"bytes": 0})["bytes"] for name in ("all_reduce", "reduce_scatter"))

    # but for the few bytes of norms
    assert reduced(4) / reduced(1) == pytest.approx(factor, rel=0.01)


def test_activations_are_the_peak_of_what_the_trace_saw():
    """At the end of forward both layers' activations live, and the moments and gradients of the rank."""
    estimate = predicted("single", 1, device="cuda")
    assert estimate.moment in ("forward", "backward")
    assert estimate.components["activations"] == 2 * 10**6


def test_without_ranks_there_is_no_communication():
    assert predicted("single", 1).collectives == {}


def test_flops_are_those_of_all_micro_steps():
    assert predicted("ddp", accumulation=3).model_flops == 21


def without_activations(backend, world_size, structure=STRUCTURE, **changes):
    kinds = ("enter", "leave", "forward_end", "enter_backward")
    gradients = (Event("gradient", number) for number in reversed(range(len(structure.parameters))))
    timeline = replace(TIMELINE, events=(*(event for event in TIMELINE.events if event.kind in kinds), *gradients))
    return predict(structure, timeline, replace(CellSetup(backend=backend, world_size=world_size, masters=False), **changes))


# By each of four ranks: bf16 parameters, masters and moments of a quarter, the batch.
STORED = 2 * NUMEL + 12 * NUMEL // 4 + 100


@pytest.mark.parametrize("backend", ["zero1", "zero2"])
def test_zero_flattens_the_gradients_in_its_bucket_to_reduce_them(backend):
    estimate = without_activations(backend, 4)
    assert estimate.peak_bytes == STORED + 2 * NUMEL + 2 * NUMEL
    assert estimate.components["reduction"] == (4 * NUMEL if backend == "zero2" else 2 * NUMEL)


def test_a_full_bucket_of_zero2_is_reduced_beside_the_gradients_that_the_rank_has_copied(monkeypatch):
    """A bucket of 1100 elements takes one layer. Rank 2 has parts of both layers, and copies both."""
    monkeypatch.setattr("benchbox.theory.communication.DEEPSPEED_BUCKET", 1100)
    estimate = without_activations("zero2", 4)
    assert estimate.components["gradients"] == 2 * 2048
    assert estimate.components["reduction"] == 2 * 1100 + 2 * 1024
    assert estimate.peak_bytes == STORED + 2 * 2048 + 2 * 1100 + 2 * 1024


def test_zero2_steps_beside_the_gradients_of_all_parameters_that_are_in_part_its_own():
    """Each of two ranks has 1320 elements: five and a half of eleven parameters."""
    parameters = [ParameterShape(name=str(number), shape=(240,), trains=True, group=0) for number in range(11)]
    estimate = without_activations("zero2", 2, Structure(parameters=tuple(parameters)))
    assert estimate.moment == "optimizer"
    assert estimate.components["gradients"] == 2 * 6 * 240
    assert estimate.components["workspace"] == 6 * 1320


@pytest.mark.parametrize(
    ("backend", "gradients", "largest"),
    [
        ("zero1", 2 * 2048, 1024),  # the second rank has 256 elements of the first layer, and copies both layers
        ("zero2", 2 * 2048, 1024),
        ("zero3", 2 * NUMEL // 2, 1024 // 2),
    ],
)
def test_deepspeed_takes_norms_of_copies_in_float64(backend, gradients, largest, monkeypatch):
    monkeypatch.setattr("benchbox.theory.communication.DEEPSPEED_BUCKET", 0)
    estimate = without_activations(backend, 2, device="cuda", stepped_size=2, moment_size=2)
    assert (estimate.moment, estimate.components["workspace"]) == ("clip", 8 * largest)
    assert estimate.components["gradients"] == gradients


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("fsdp2", NUMEL // 2),  # the result beside the copy, in place of the gradients that were copied into the input
        ("zero3", NUMEL),
    ],
)
def test_gloo_copies_the_gradients_that_it_scatters_and_nccl_does_not(backend, more, monkeypatch):
    monkeypatch.setattr(MODELS[backend], "_finish", lambda _: None)  # clipping needs more than backward here
    structure = Structure(parameters=(ParameterShape(name="root", shape=(NUMEL,), trains=True, group=0),), layout={"": (0,)})
    sizes = {"stepped_size": 2, "moment_size": 2}
    peaks = {
        device: without_activations(backend, 2, structure, device=device, **sizes).peak_bytes for device in ("cpu", "cuda")
    }
    assert peaks["cpu"] == peaks["cuda"] + 2 * more


@pytest.mark.parametrize(
    ("backend", "gathered", "moment"),
    [
        # The root, a layer, and the layer that backward enters next beside the shard that is cast to gather it.
        ("fsdp1_full", 2 * (512 + 1024 + 1024) + 2 * 512, "backward"),
        ("fsdp1_grad_op", 2 * NUMEL, "forward"),
    ],
)
def test_full_shard_frees_a_layer_after_forward_and_gathers_the_next_one_early_in_backward(backend, gathered, moment):
    estimate = predicted(backend, device="cuda")
    assert (estimate.components["all_gather"], estimate.moment) == (gathered, moment)
    assert estimate.peak_bytes == 12 * NUMEL // 2 + 100 + 2 * 10**6 + gathered


@pytest.mark.parametrize(
    ("backend", "gradients", "reduction"),
    [
        ("single", 2 * NUMEL, 0),
        ("ddp", 2 * NUMEL, 2 * NUMEL),  # beside the buckets, which stay
        ("fsdp1_full", 0, 2 * NUMEL),  # flat gradients that are not reduced yet
        ("fsdp2", 2 * NUMEL, 0),
        ("zero1", 2 * NUMEL, 2 * NUMEL),
        ("zero2", 2 * 2048, 0),  # of the two layers that are in part this rank's own
    ],
)
def test_gradients_of_micro_steps_are_added_up_in_one_place(backend, gradients, reduction):
    """The peak is in the forward pass of a later micro-step, or where backward begins, beside what the earlier ones left."""
    estimate = predicted(backend, 1 if backend == "single" else 2, accumulation=3, device="cuda")
    assert estimate.components["activations"] == 2 * 10**6
    assert estimate.components.get("gradients", 0) == gradients
    assert estimate.components.get("reduction", 0) == reduction
    assert estimate.components["batch"] == 3 * 100


def test_ddp_frees_what_micro_steps_have_added_up_as_it_reduces_it():
    setup = CellSetup(backend="ddp", world_size=2, accumulation=3)
    assert MODELS["ddp"](STRUCTURE, TIMELINE, setup).run().current["gradients"] == 0


def test_what_checkpointing_repeats_is_repeated_in_every_micro_step():
    timeline = replace(TIMELINE, recomputed_flops=5)
    estimate = predict(STRUCTURE, timeline, CellSetup(backend="ddp", world_size=2, accumulation=3))
    assert (estimate.model_flops, estimate.recomputed_flops) == (21, 15)
