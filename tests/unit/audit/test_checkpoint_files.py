"""Checkpoints of one process, made by the libraries that write them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import save_file
from torch import nn

from benchbox.audit.judge import judge
from benchbox.audit.selection import Selection
from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import DataError
from benchbox.observer.facts import SECTIONS, RankFacts
from benchbox.optim.masters import MasterWeightOptimizer

STEPS = 4


def train(dtype=torch.float32, optimizer_class=torch.optim.AdamW, **options):
    """Return a trained model with a buffer and two linear layers of one shape, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(dtype)
    model.register_buffer("inv_freq", torch.rand(4))
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    for step in range(STEPS):
        torch.manual_seed(step)
        model(torch.randn(8, 16, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def read_one(path) -> RankFacts:
    (facts,) = read_checkpoint(path)
    assert facts.source == "checkpoint"
    assert facts == RankFacts.from_dict(json.loads(json.dumps(facts.to_dict())))
    return facts


def by_name(facts):
    return {tensor.name: tensor for tensor in facts.stepped}


def fired(facts):
    return {finding.code for finding in judge([facts], Selection()).findings}


def round_to_bfloat16(tensor):
    return tensor.bfloat16().float()


@pytest.mark.parametrize("keys", [("model", "optimizer"), ("policy_state", "opt"), ("state_dict", "optimizer_states")])
def test_a_model_and_an_optimizer_are_found_under_any_keys(tmp_path, keys):
    model, optimizer = train()
    state = [optimizer.state_dict()] if keys[1].endswith("s") else optimizer.state_dict()
    torch.save({keys[0]: model.state_dict(), keys[1]: state, "step": 4, "rng": torch.get_rng_state()}, tmp_path / "a.pt")
    facts = read_one(tmp_path / "a.pt")
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.live) for tensor in facts.stepped] == [
        ("0.weight", "float32", (16, 16), True),
        ("0.bias", "float32", (16,), True),
        ("1.weight", "float32", (16, 16), True),
        ("1.bias", "float32", (16,), True),
    ]
    weight = facts.stepped[0]
    assert (weight.lr, weight.betas, weight.eps, weight.weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 1e-2)
    assert weight.state == {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    assert (weight.step_count, weight.numbers.steps_before) == (STEPS, STEPS)
    assert weight.numbers.bf16_valued["weight"] < 0.01
    assert facts.optimizer_chain == ("AdamW",)
    assert facts.groups == ((1e-2, 4),)
    assert [(buffer.name, buffer.dtype) for buffer in facts.buffers] == [("inv_freq", "float32")]
    counted = {(entry.kind, entry.dtype): (entry.tensors, entry.elements, entry.bytes) for entry in facts.entries}
    assert counted["parameter", "float32"] == counted["exp_avg", "float32"] == (4, 544, 2176)
    assert counted["buffer", "float32"] == (1, 4, 16)
    assert counted["step", "float32"] == (4, 4, 16)


def test_sections_that_a_checkpoint_cannot_show_are_missing_with_the_reason(tmp_path):
    model, optimizer = train()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    facts = read_one(tmp_path / "a.pt")
    assert SECTIONS.keys() - facts.missing.keys() == {"stepped", "options", "buffers"}
    assert facts.missing["collectives"] == "a checkpoint shows no steps"
    assert facts.missing["links"] == "the checkpoint holds no masters beside live weights"
    judgement = judge([facts], Selection())
    assert judgement.findings == ()
    assert {"BXP101", "BXP201", "BXP204", "BXP501", "BXP502", "BXP602"} <= set(judgement.clean)
    assert {"BXP102", "BXP104", "BXP105", "BXP302", "BXP404", "BXP603"} <= judgement.not_judged.keys()


@pytest.mark.parametrize("old_format", [False, True])
def test_16_bit_weights_and_moments_are_reported(tmp_path, old_format):
    model, optimizer = train(torch.bfloat16)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=not old_format)
    facts = read_one(tmp_path / "a.pt")
    weight = by_name(facts)["0.weight"]
    assert (weight.dtype, weight.live, weight.state["exp_avg_sq"]) == ("bfloat16", True, "bfloat16")
    assert weight.numbers.second_moment_stalled > 0.99
    assert weight.numbers.bf16_valued == {}
    assert {"BXP101", "BXP106", "BXP201"} <= fired(facts)


def test_weights_and_moments_that_went_through_bfloat16_are_recognised_by_their_values(tmp_path):
    model, optimizer = train()
    state = optimizer.state_dict()
    for moments in state["state"].values():
        moments["exp_avg_sq"] = round_to_bfloat16(moments["exp_avg_sq"])
    weights = {name: round_to_bfloat16(value) for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": state}, tmp_path / "a.pt")
    facts = read_one(tmp_path / "a.pt")
    shares = by_name(facts)["1.weight"].numbers.bf16_valued
    assert (shares["weight"], shares["exp_avg_sq"]) == (1.0, 1.0)
    assert shares["exp_avg"] < 0.1
    assert fired(facts) == {"BXP501", "BXP502"}


def test_shares_are_exact_and_exclude_elements_without_a_gradient(tmp_path):
    """1.0 and 1.5 are bfloat16 numbers, 1 + 2^-8 and 1 + 2^-23 are not; zeros and untouched elements count as neither."""
    weight = nn.Parameter(torch.tensor([1.0, 1.5, 1.0 + 2**-8, 1.0 + 2**-23, 0.0, 1.0 + 2**-20]))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    weight.grad = torch.ones(6)
    optimizer.step()
    with torch.no_grad():
        weight.copy_(torch.tensor([1.0, 1.5, 1.0 + 2**-8, 1.0 + 2**-23, 0.0, 1.0 + 2**-20]))
    state = optimizer.state[weight]
    state["exp_avg_sq"] = torch.tensor([2.0, 2.0, 2.0, 2.0 + 2**-22, 2.0, 0.0])
    torch.save({"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    (tensor,) = read_one(tmp_path / "a.pt").stepped
    assert tensor.numbers.bf16_valued["weight"] == 2 / 4
    assert tensor.numbers.bf16_valued["exp_avg_sq"] == 4 / 5


def test_zeros_do_not_count_for_an_optimizer_without_state(tmp_path):
    """SGD keeps no trace of past gradients, so a zero weight shows nothing."""
    weight = nn.Parameter(torch.tensor([0.0, 0.0, 1.0, 1.0 + 2**-20]))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    torch.save({"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    facts = read_one(tmp_path / "a.pt")
    assert facts.optimizer_chain == ("SGD",)
    assert [(tensor.name, tensor.dtype) for tensor in facts.stepped] == [("w", "float32")]
    assert facts.stepped[0].numbers.bf16_valued["weight"] == 1 / 2


def test_masters_beside_16_bit_weights_are_compared_with_them(tmp_path):
    """benchbox's own layout. safetensors sorts names, so the masters of one shape are matched by what they round to."""
    model, optimizer = train(torch.bfloat16, MasterWeightOptimizer, fused=True)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    facts = read_one(tmp_path)
    weight = by_name(facts)["1.weight"]
    assert (weight.dtype, weight.live, weight.live_dtype) == ("float32", False, "bfloat16")
    assert weight.numbers.bf16_valued["weight"] < 0.05
    assert {tensor.numbers.live_differs for tensor in facts.stepped} == {0.0}
    assert set(by_name(facts)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert fired(facts) == set()
    assert "BXP104" in judge([facts], Selection()).clean


def test_live_weights_that_are_not_their_rounded_masters_are_found(tmp_path):
    """The stale one is the first master, and its name is the last of its shape: it must not be linked to another weight."""
    model, _ = train()
    live = model.bfloat16()
    optimizer = MasterWeightOptimizer(reversed(list(live.parameters())), lr=1e-3)
    live(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        live[1].weight.add_(1)
        live[0].bias[0] += 1
    save_file(live.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    facts = read_one(tmp_path)
    differs = {name: tensor.numbers.live_differs for name, tensor in by_name(facts).items()}
    assert differs == {"1.bias": 0.0, "1.weight": 1.0, "0.bias": 1 / 16, "0.weight": 0.0}
    assert "BXP104" in fired(facts)


def saved_with_masters(folder, live, masters):
    """Save weights of one shape, and the state of an optimizer that steps the first of them by these masters."""
    weights = [nn.Parameter(weight.clone()) for weight in [*live.values()][: len(masters)]]
    optimizer = MasterWeightOptimizer(weights, lr=1e-3)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    save_file(live, folder / "model.safetensors")
    torch.save({**optimizer.state_dict(), "masters": masters}, folder / "optimizer.pt")
    return {tensor.name: tensor.numbers.live_differs for tensor in read_one(folder).stepped}


def test_a_stale_master_is_not_compared_with_one_of_several_weights_that_may_be_its_own(tmp_path):
    """The other one is frozen."""
    master, frozen = torch.randn(64), torch.randn(64)
    live = {"trained": master.bfloat16() + 1, "frozen": frozen.bfloat16()}
    assert saved_with_masters(tmp_path, live, [master]) == {"parameter 0": None}


def test_a_stale_master_does_not_take_the_weight_that_another_one_rounds_to(tmp_path):
    """Its own weight differs from it in all elements, and that of the other in a quarter."""
    stale = torch.randn(64)
    master = torch.cat([stale[:48], stale[48:] + 1])
    live = {"a": stale.bfloat16() + 5, "b": master.bfloat16()}
    assert saved_with_masters(tmp_path, live, [stale, master]) == {"a": 1.0, "b": 0.0}


def test_masters_derived_from_the_live_weights_are_found(tmp_path):
    model, optimizer = train(torch.bfloat16, MasterWeightOptimizer, fused=True)
    state = optimizer.state_dict()
    state["masters"] = [parameter.detach().float() for parameter in model.parameters()]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "optimizer.pt")
    facts = read_one(tmp_path)
    assert {tensor.numbers.bf16_valued["weight"] for tensor in facts.stepped} == {1.0}
    assert "BXP501" in fired(facts)


def test_float32_tensors_of_another_number_are_no_masters(tmp_path):
    model, optimizer = train()
    saved = {"optimizer": optimizer.state_dict(), "model": model.state_dict(), "fp32_statistics": [torch.zeros(3)]}
    torch.save(saved, tmp_path / "a.pt")
    facts = read_one(tmp_path / "a.pt")
    assert len(facts.stepped) > 1
    assert all(tensor.live for tensor in facts.stepped)


def test_masters_beside_an_optimizer_belong_to_it(tmp_path):
    """Megatron's and apex's layouts: the optimizer's state, and lists of masters under a key of their own."""
    model, _ = train(torch.bfloat16)
    masters = [nn.Parameter(parameter.detach().float() + 1e-5) for parameter in model.parameters()]
    inner = torch.optim.AdamW(masters, lr=1e-3)
    saved = {"optimizer": inner.state_dict(), "fp32_from_fp16_params": [[master.detach() for master in masters]]}
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "a.pt")
    facts = read_one(tmp_path / "a.pt")
    assert {(tensor.dtype, tensor.live, tensor.live_dtype) for tensor in facts.stepped} == {("float32", False, "bfloat16")}


@pytest.mark.parametrize("safetensors", [True, False])
def test_checkpoints_of_accelerate_are_read(tmp_path, safetensors):
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*train())
    accelerator.save_state(tmp_path / "state", safe_serialization=safetensors)
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    facts = read_one(tmp_path / "state")
    assert {name: tensor.dtype for name, tensor in by_name(facts).items()} == dict.fromkeys(
        dict(model.named_parameters()), "float32"
    )
    assert {tensor.step_count for tensor in facts.stepped} == {STEPS}
    assert fired(facts) == set()


@pytest.mark.parametrize("name", ["adapter_model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_weights_of_peft_and_diffusers_are_read_with_the_optimizer_beside_them(tmp_path, name, suffix):
    model, optimizer = train(torch.bfloat16)
    if suffix == "bin":
        torch.save(model.state_dict(), tmp_path / f"{name}.bin")
    else:
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    facts = read_one(tmp_path)
    assert {tensor.dtype for tensor in facts.stepped} == {"bfloat16"}
    assert {"BXP101"} <= fired(facts)


def test_shards_of_diffusers_are_one_model_if_all_are_there(tmp_path):
    names = [f"diffusion_pytorch_model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    index = {"weight_map": {f"part{part}.weight": name for part, name in enumerate(names)}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    for part, name in enumerate(names):
        with pytest.raises(DataError):
            read_checkpoint(tmp_path)
        save_file({f"part{part}.weight": torch.ones(2, 2)}, tmp_path / name)
    assert {parameter.name for parameter in read_one(tmp_path).parameters} == {"part0.weight", "part1.weight"}


def test_a_model_in_several_files_is_one_model(tmp_path):
    model, optimizer = train()
    parts = list(model.state_dict().items())
    files = {"model-00001-of-00002.safetensors": dict(parts[:2]), "model-00002-of-00002.safetensors": dict(parts[2:])}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    index = {"weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    facts = read_one(tmp_path)
    assert {parameter.name for parameter in facts.parameters} == set(dict(model.named_parameters()))


def write_lerobot(folder, model, optimizer):
    """Write a checkpoint in the layout of LeRobot's `save_checkpoint`."""
    (folder / "pretrained_model").mkdir(parents=True)
    (folder / "training_state").mkdir()
    save_file(model.state_dict(), folder / "pretrained_model" / "model.safetensors")
    saved = optimizer.state_dict()
    flat = {f"state/{key}/{name}": value for key, state in saved["state"].items() for name, value in state.items()}
    save_file(flat, folder / "training_state" / "optimizer_state.safetensors")
    (folder / "training_state" / "optimizer_param_groups.json").write_text(json.dumps(saved["param_groups"]))
    (folder / "training_state" / "training_step.json").write_text('{"step": 4}')


@pytest.mark.parametrize("subfolder", ["", "training_state"])
def test_lerobots_training_state_is_read_with_the_model_beside_it(tmp_path, subfolder):
    write_lerobot(tmp_path, *train(torch.bfloat16))
    facts = read_one(tmp_path / subfolder)
    assert {(tensor.dtype, tensor.state["exp_avg_sq"], tensor.betas) for tensor in facts.stepped} == {
        ("bfloat16", "bfloat16", (0.9, 0.999))
    }
    assert {"BXP101", "BXP201"} <= fired(facts)


def test_weights_of_one_shape_are_not_guessed_where_options_differ(tmp_path):
    """Two groups have weights of equal shapes, in a file that lost their order."""
    model, _ = train()
    optimizer = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 1e-5}], lr=1e-3)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    write_lerobot(tmp_path, model, optimizer)
    facts = read_one(tmp_path)
    assert [(tensor.name, tensor.dtype, tensor.lr) for tensor in facts.stepped] == [
        ("parameter 0", "float32", 1e-3),
        ("parameter 1", "float32", 1e-3),
        ("parameter 2", "float32", 1e-5),
        ("parameter 3", "float32", 1e-5),
    ]
    assert all(tensor.numbers.bf16_valued["weight"] < 0.01 for tensor in facts.stepped)


def test_an_optimizer_without_its_weights_is_judged_by_its_state(tmp_path):
    _, optimizer = train(torch.bfloat16)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    facts = read_one(tmp_path / "optimizer.pt")
    assert {tensor.dtype for tensor in facts.stepped} == {"unknown"}
    assert facts.missing["stepped"] == "the checkpoint does not show the weights of 4 of 4 stepped tensors"
    judgement = judge([facts], Selection())
    assert [finding.code for finding in judgement.findings] == ["BXP201"]
    assert "BXP101" in judgement.not_judged


@pytest.mark.parametrize("fused", [True, None])
def test_a_checkpoint_shows_whether_its_optimizer_was_fused(tmp_path, fused):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    assert {tensor.fused for tensor in read_one(tmp_path / "a.pt").stepped} == {fused is True}


def test_weights_alone_show_their_buffers(tmp_path):
    save_file({"rope.inv_freq": torch.ones(4).bfloat16(), "head.weight": torch.ones(2, 2)}, tmp_path / "weights.safetensors")
    facts = read_one(tmp_path / "weights.safetensors")
    assert facts.missing["stepped"] == "the checkpoint holds no optimizer state"
    assert [parameter.name for parameter in facts.parameters] == ["head.weight"]
    assert fired(facts) == {"BXP602"}


@dataclass
class Settings:
    rate: float = 1e-3


def test_objects_of_foreign_classes_are_ignored(tmp_path):
    """Many scripts save their configuration beside the model."""
    model, optimizer = train()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "settings": Settings(), "folder": tmp_path}
    torch.save(saved, tmp_path / "a.pt")
    assert len(read_one(tmp_path / "a.pt").stepped) == 4


def test_averages_of_the_weights_are_no_model_that_was_stepped(tmp_path):
    model, optimizer = train()
    average = {name: value.bfloat16() for name, value in model.state_dict().items()}
    torch.save({"model_ema": average, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    assert {parameter.dtype for parameter in read_one(tmp_path / "a.pt").parameters} == {"float32"}


def test_of_a_sharded_model_in_both_formats_safetensors_is_read_and_only_its_index(tmp_path):
    parts = [{"a.weight": torch.ones(4, 4)}, {"b.weight": torch.ones(4, 4)}]
    for stem, suffix, save in (("model", "safetensors", save_file), ("pytorch_model", "bin", torch.save)):
        names = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
        for part, name in zip(parts, names, strict=True):
            save(part, tmp_path / name)
        weight_map = dict(zip(("a.weight", "b.weight"), names, strict=True))
        (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert {parameter.name for parameter in read_one(tmp_path).parameters} == {"a.weight", "b.weight"}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"model.safetensors.index.json names model-00002-of-00002.safetensors"):
        read_checkpoint(tmp_path)
