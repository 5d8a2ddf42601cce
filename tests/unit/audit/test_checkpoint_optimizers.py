"""Optimizers in checkpoints: whose arithmetic is known, which weights they stepped, and state of unusual kinds."""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from torchao.optim import AdamW8bit
from torchao.optim.adam import _AdamW
from transformers import Adafactor

from benchbox.audit.judge import judge
from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.audit.subjects.checkpoint.optimizers import has_known_arithmetic, read_parameter_states
from tests.support.checkpoint_formats import refusal_line

STEPS = 4
BFLOAT16 = torch.bfloat16


class Model(nn.Module):
    """Weights of several shapes; row sums of some are as long as biases."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False)

    def forward(self, inputs):
        hidden = self.inner(inputs.to(self.inner.weight.dtype))
        return self.head(self.norm(hidden.to(self.norm.weight.dtype)).to(self.head.weight.dtype))


def train(build_optimizer, model):
    optimizer = build_optimizer(model.parameters())
    with torch.compiler.set_stance("force_eager"):
        for step in range(STEPS):
            torch.manual_seed(step)
            model(torch.randn(8, 64)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def read(path):
    (facts,) = read_checkpoint(path)
    return facts


def read_saved(folder, model, optimizer, **values):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **values}, folder / "a.pt")
    return read(folder / "a.pt")


def severities(facts):
    return {finding.code: finding.severity for finding in judge([facts]).findings}


def dtypes(facts):
    return {tensor.name: tensor.dtype for tensor in facts.stepped}


@pytest.mark.parametrize("stochastic", [True, False])
def test_whether_an_optimizer_of_another_library_rounds_stochastically_is_unknown(tmp_path, stochastic):
    """Nothing in torchao's state dictionary tells."""
    build = lambda parameters: _AdamW(parameters, lr=1e-3, bf16_stochastic_round=stochastic)  # noqa: E731
    facts = read_saved(tmp_path, *train(build, Model().bfloat16()))
    assert facts.optimizer_chain == ("optimizer",)
    assert severities(facts)["BXP101"] == severities(facts)["BXP604"] == "unknown"
    assert severities(read_saved(tmp_path, *train(adamw, Model().bfloat16())))["BXP101"] == "error"


def test_an_optimizer_of_another_library_on_float32_weights_raises_no_question(tmp_path):
    assert severities(read_saved(tmp_path, *train(lambda parameters: _AdamW(parameters, lr=1e-3), Model()))) == {}


@pytest.fixture(params=["torchao imported", "not imported"])
def torchao_classes(request):
    """Let torch load classes of torchao by themselves, as importing torchao does, or not."""
    registered = get_safe_globals()
    if request.param == "not imported":
        clear_safe_globals()
    yield
    add_safe_globals(registered)


@pytest.mark.usefixtures("torchao_classes")
def test_quantised_state_of_torchao_is_read(tmp_path):
    facts = read_saved(tmp_path, *train(lambda parameters: AdamW8bit(parameters, lr=1e-3), Model()))
    state = {tensor.name: tensor.state["exp_avg"] for tensor in facts.stepped}
    assert state["inner.weight"] == state["head.weight"] == "uint8"
    assert state["inner.bias"] == "float32"
    assert severities(facts) == {"BXP202": "info"}
    (entry,) = [entry for entry in facts.entries if (entry.kind, entry.dtype) == ("exp_avg", "uint8")]
    weights, blocks = 2 * 64 * 96, 2 * 64 * 96 // 256
    table_bytes = 256 * 4
    assert (entry.tensors, entry.elements, entry.bytes) == (2, weights, weights + 4 * blocks + 2 * table_bytes)


@pytest.mark.parametrize(("dtype", "severity"), [(torch.float32, None), (BFLOAT16, "error")])
def test_state_that_bitsandbytes_nests_is_read_and_tells_that_it_steps_the_weights_themselves(tmp_path, dtype, severity):
    weight = torch.randn(8, 8).to(dtype)
    nested = {"state1": torch.zeros(8, 8, dtype=torch.uint8), "absmax1": torch.zeros(1)}
    group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = {"state": {0: {"step": 3, "__bnb_optimizer_quant_state__": nested}}, "param_groups": [group]}
    torch.save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "a.pt")
    facts = read(tmp_path / "a.pt")
    (tensor,) = facts.stepped
    assert (tensor.name, tensor.state) == ("w", {"state1": "uint8", "absmax1": "float32"})
    assert tensor.optimizer == "optimizer of bitsandbytes"
    assert facts.opaque == ()
    assert severities(facts).get("BXP101") == severity


@pytest.mark.parametrize("kind", [Adafactor, torch.optim.Adafactor])
def test_factored_moments_are_those_of_the_weight_whose_rows_and_columns_they_have(tmp_path, kind):
    model = Model()
    model.norm.bfloat16()
    facts = read_saved(tmp_path, *train(lambda parameters: kind(parameters), model))
    assert dtypes(facts) == {name: str(value.dtype).removeprefix("torch.") for name, value in model.named_parameters()}
    assert facts.missing.get("stepped") is None


@pytest.mark.parametrize("kind", [Adafactor, torch.optim.Adafactor])
def test_factored_moments_tell_the_shape_of_a_weight_that_is_not_shown(tmp_path, kind):
    """The decay of a matrix that an optimizer steps as a row is judged; these were stepped as matrices."""
    model = Model()
    groups = [{"params": [*model.parameters()], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.1}]
    model, optimizer = train(lambda _: kind(groups), model)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for facts in (read(tmp_path / "optimizer.pt"), read_saved(tmp_path, model.bfloat16(), optimizer)):
        assert [(tensor.shape, tensor.elements) for tensor in facts.stepped] == [(shape, prod(shape)) for shape in shapes]
        assert "BXP406" not in severities(facts)


def test_weights_of_one_shape_are_told_apart_by_the_dtype_of_their_state(tmp_path):
    model = Model().bfloat16()
    model.norm.float()
    halves = [[p for p in model.parameters() if p.dtype == dtype] for dtype in (BFLOAT16, torch.float32)]
    groups = [{"params": half, "lr": lr} for half, lr in zip(halves, (1e-3, 1e-4), strict=True)]
    model, optimizer = train(lambda _: torch.optim.AdamW(groups), model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # in another order
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    facts = read(tmp_path)
    assert {tensor.name for tensor in facts.stepped if tensor.lr == 1e-3} == {"inner.weight", "inner.bias", "head.weight"}
    assert {tensor.dtype for tensor in facts.stepped if tensor.lr == 1e-4} == {"float32"}


def test_bfloat16_weights_beside_float32_moments_of_torch_are_not_what_was_stepped(tmp_path):
    """torch's AdamW creates moments in the dtype of what it steps: the weights were rounded when they were saved."""
    model, optimizer = train(adamw, Model())
    facts = read_saved(tmp_path, model.bfloat16(), optimizer)
    judgement = judge([facts])
    assert set(dtypes(facts).values()) == {"unknown"}
    assert judgement.findings == ()
    assert "does not show the weights" in judgement.not_judged["BXP101"]


def test_rounded_weights_of_one_shape_are_not_taken_for_stepped_ones_where_nothing_tells_them_apart(tmp_path):
    model, optimizer = train(lambda parameters: torch.optim.AdamW([{"params": [p], "lr": 1e-3} for p in parameters]), Model())
    optimizer.param_groups[1]["lr"] = 1e-4  # of inner.bias: norm.weight and norm.bias are as long
    save_file(model.bfloat16().state_dict(), tmp_path / "model.safetensors")  # in another order
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    facts = read(tmp_path)
    assert "parameter 1" in dtypes(facts)
    assert set(dtypes(facts).values()) == {"unknown"}


@pytest.mark.parametrize(("build", "name"), [(adamw, "kahan_comp"), (adamw, "master"), (lambda p: _AdamW(p), "kahan_comp")])
def test_state_that_keeps_updates_from_being_lost_answers_for_bfloat16_weights_of_any_optimizer(tmp_path, build, name):
    model, optimizer = train(build, Model().bfloat16())
    for state in optimizer.state.values():
        state |= {key: state[key].float() for key in ("exp_avg", "exp_avg_sq")} | {name: state["exp_avg"].float()}
    facts = read_saved(tmp_path, model, optimizer)
    assert set(dtypes(facts).values()) == {"bfloat16"}
    assert all(name in tensor.compensation for tensor in facts.stepped)
    assert not {"BXP101", "BXP604"} & severities(facts).keys()


def test_weights_at_the_top_of_a_distributed_checkpoint_keep_their_names_beside_a_second_model(tmp_path):
    dcp.save({"w": torch.ones(2), "other": {"w": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    assert {parameter.name for parameter in read(tmp_path).parameters} == {"w", "other.w"}


def test_parameters_that_never_had_a_gradient_are_the_weights_that_no_other_one_is(tmp_path):
    model = Model()
    model.head.requires_grad_(requires_grad=False)
    model.head.bfloat16()
    optimizer = adamw(model.parameters())
    for parameter in (model.inner.weight, model.inner.bias, model.norm.weight, model.norm.bias):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert dtypes(read_saved(tmp_path, model, optimizer))["head.weight"] == "bfloat16"


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam])
def test_numbers_for_a_whole_tensor_are_no_rounded_moments(tmp_path, kind):
    """ASGD's mu is 1, and so is NAdam's product of them if its decay is 0."""
    facts = read_saved(tmp_path, *train(lambda parameters: kind(parameters, lr=1e-3), Model()))
    assert "BXP502" not in severities(facts)
    assert all(set(tensor.numbers.bf16_valued) <= {"weight", "exp_avg", "exp_avg_sq", "ax"} for tensor in facts.stepped)


@pytest.mark.parametrize("kind", [kind for kind in vars(torch.optim).values() if isinstance(kind, type)])
def test_the_options_of_every_optimizer_of_torch_tell_that_it_is_one(kind):
    if kind is not torch.optim.Optimizer:
        state_dict = kind([nn.Parameter(torch.zeros(2, 2))], lr=1e-3).state_dict()
        assert has_known_arithmetic(read_parameter_states(state_dict))


def test_muon_is_no_sgd(tmp_path):
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert read_saved(tmp_path, model, optimizer).optimizer_chain == ("Muon",)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "Adam or AdamW"), ({"max_coeff": 10.0, "min_coeff": 0.01}, "Lamb"), ({"grad_averaging": True}, "Lamb or NovoGrad")],
)
def test_lamb_is_no_adam(tmp_path, options, kind):
    """The options are those of the fused classes of DeepSpeed and apex, which run on GPUs only."""
    model, optimizer = train(adamw, Model())
    known = {name: optimizer.param_groups[0][name] for name in ("params", "lr", "betas", "eps", "weight_decay")}
    optimizer.param_groups[0] = known | {"bias_correction": True} | options
    assert read_saved(tmp_path, model, optimizer).optimizer_chain == (kind,)


@pytest.mark.parametrize("betas", [None, (), (None, 0.999), "0.9", (0.9, 0.99, 0.999), [0.9], {"a": 1}])
def test_options_that_are_no_pair_of_betas_are_read_past(tmp_path, betas):
    model, optimizer = train(adamw, Model())
    optimizer.param_groups[0]["betas"] = betas
    optimizer.param_groups[0]["weight_decay"] = [0.1]
    assert {tensor.betas for tensor in read_saved(tmp_path, model, optimizer).stepped} <= {None, (0.9, 0.99)}


@pytest.mark.parametrize("count", [float("nan"), torch.tensor(float("inf")), torch.tensor(1 + 2j), "four", None])
def test_a_step_that_is_no_number_is_an_unknown_step(tmp_path, count):
    model, optimizer = train(adamw, Model())
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["step"] = count
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    assert {tensor.step_count for tensor in read(tmp_path / "a.pt").stepped} == {None}


@pytest.mark.parametrize(("step", "count"), [(3, 3.0), (float("nan"), None)])
def test_a_stage_of_a_universal_checkpoint_steps_its_own_parameters(tmp_path, step, count):
    """DeepSpeed puts the parameters of all stages of a pipeline into one folder."""
    for stage in (0, 1):
        name = f"{stage}.weight"
        shapes = [{name: torch.Size([4, 4])}]
        torch.save({"module": None, "param_shapes": shapes, "buffer_names": []}, tmp_path / f"mp_rank_0{stage}_model_states.pt")
        torch.save({"weight": torch.ones(4, 4, dtype=BFLOAT16)}, tmp_path / f"layer_0{stage}-model_states.pt")
        folder = tmp_path / "zero" / name
        folder.mkdir(parents=True)
        for key, value in (("fp32", torch.ones(4, 4)), ("exp_avg", torch.zeros(4, 4))):
            torch.save({"param": value}, folder / f"{key}.pt")
        torch.save(step, folder / "step.pt")
    ranks = [
        [(tensor.name, tensor.live_dtype, tensor.step_count) for tensor in facts.stepped] for facts in read_checkpoint(tmp_path)
    ]
    assert ranks == [[("0.weight", "bfloat16", count)], [("1.weight", "bfloat16", count)]]


@pytest.mark.parametrize("keys", [3, None, [[0], [1]]])
def test_groups_without_a_list_of_keys_are_no_optimizer(tmp_path, keys):
    model, optimizer = train(adamw, Model())
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["params"] = keys
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    assert read(tmp_path / "a.pt").stepped == ()


@pytest.mark.parametrize("key", ["averaged", "avg_model", "polyak", "teacher", "ema_model"])
def test_averages_under_any_usual_key_are_left_out(tmp_path, key):
    model, optimizer = train(adamw, Model())
    average = {name: value.bfloat16() for name, value in model.state_dict().items()}
    facts = read_saved(tmp_path, model, optimizer, **{key: average})
    assert set(dtypes(facts)) == {name for name, _ in model.named_parameters()}
    assert {parameter.dtype for parameter in facts.parameters} == {"float32"}


def test_an_average_of_torch_is_left_out_under_any_key(tmp_path):
    model, optimizer = train(adamw, Model())
    facts = read_saved(tmp_path, model, optimizer, second=AveragedModel(model).bfloat16().state_dict())
    assert {parameter.dtype for parameter in facts.parameters} == {"float32"}


def test_of_lightnings_two_models_the_stepped_one_is_read(tmp_path):
    model, optimizer = train(adamw, Model())
    average = {name: value.bfloat16() for name, value in model.state_dict().items()}
    saved = {"state_dict": average, "current_model_state": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(saved, tmp_path / "a.ckpt")
    assert set(dtypes(read(tmp_path / "a.ckpt")).values()) == {"float32"}


def test_averages_in_other_files_and_in_distributed_checkpoints_are_left_out(tmp_path):
    model, optimizer = train(adamw, Model())
    average = {name: value.bfloat16() for name, value in model.state_dict().items()}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(average, tmp_path / "model_ema.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = {"model": model.state_dict(), "ema": average, "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "distributed", no_dist=True)
    for path in (tmp_path, tmp_path / "distributed"):
        assert {parameter.dtype for parameter in read(path).parameters} == {"float32"}
        assert set(dtypes(read(path)).values()) == {"float32"}


def test_tensors_of_another_class_are_named_and_not_called_damage(tmp_path):
    """FSDP1's ShardedTensor is saved in the same way."""
    torch.save({"model": {"w": WrappedTensor(torch.ones(4))}}, tmp_path / "a.pt")
    line = refusal_line(tmp_path / "a.pt")
    assert "WrappedTensor" in line
    assert "damaged" not in line


class WrappedTensor(torch.Tensor):
    """Tensor that keeps its values in another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError
