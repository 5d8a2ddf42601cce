"""pi0 and pi05 against openpi's formulas (`tests/reference/openpi.py`), which read the weights that we export by its names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from benchbox_policies._layers.families.flow import interpolate, time_from_uniform
from benchbox_policies._layers.sequence.attention_mask import AttentionMask
from benchbox_policies._layers.weights.export import published_state_dict
from safetensors.torch import load_file, save_file

from benchbox.data import open_dataset
from benchbox.data.dataset.frame_images import letterbox
from benchbox.data.normalisation import Normaliser
from benchbox.data.sample import sample_path
from benchbox.data.text.prompt import ByteTokenizer, encode_prompt, state_bins
from tests.parity.lerobot import CLIENT_VERSION, requires_lerobot, run_script
from tests.parity.pi import PRESETS, REAL_DIMS, build_pi, network_pixels, pi_batch
from tests.reference import openpi

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchbox.registry.contracts import Batch, Policy
    from tests.parity.table import ParityTable

PEER = "formulas of openpi"
SIZES = [(224, 224), (32, 32), (37, 50)]
MODES = {"pi0": "mean_std", "pi05": "quantile"}


@pytest.fixture(scope="module", params=PRESETS)
def policy(request: pytest.FixtureRequest) -> Policy:
    return build_pi(request.param)


def name_of(policy: Policy) -> str:
    return type(policy).__name__.lower()


def openpi_network(policy: Policy, weights: dict[str, Tensor] | None = None) -> openpi.Network:
    vision, backbone = policy.config.model.vision, policy.config.model.backbone
    weights = weights or published_state_dict(policy)
    return openpi.Network(weights, vision_heads=vision.heads, heads=backbone.heads, patch=vision.patch)


def openpi_inputs(policy: Policy, batch: Batch) -> openpi.Inputs:
    return openpi.Inputs(
        images=network_pixels(batch["images"]),
        image_mask=batch["image_mask"][:, 0],
        tokens=batch["prompt_tokens"],
        token_mask=batch["prompt_mask"],
        state=batch["state"][:, -1] if policy.reads_state else None,
    )


def test_velocity_loss_and_gradients_are_those_of_openpi(policy: Policy, parity: ParityTable) -> None:
    name, batch = name_of(policy), pi_batch(policy)
    time = time_from_uniform(batch["uniform"][:, 0])
    noise, action = batch["noise"][:, 0], batch["action"]
    x_t = openpi.noisy_actions(action, noise, time)
    _, target = interpolate(action, noise, time)
    weights = {key: tensor.clone().requires_grad_() for key, tensor in published_state_dict(policy).items()}
    theirs = openpi_network(policy, weights).velocity(openpi_inputs(policy, batch), x_t, time)
    elements = openpi.loss_elements(theirs, action, noise)
    elements[..., :REAL_DIMS].mean().backward()

    velocities: list[Tensor] = []
    hook = policy.action_out.register_forward_hook(lambda module, inputs, output: velocities.append(output.detach()))
    policy.zero_grad()
    losses = policy(batch)
    hook.remove()
    losses.total.backward()
    parity.compare(name, PEER, "velocity", velocities[0], theirs)
    parity.compare(name, PEER, "loss elements", (velocities[0] - target).square(), elements)
    parity.compare(
        name,
        PEER,
        "loss of a batch with padded dimensions",
        losses.total,
        elements.mean(),
        bound=1.0,
        reason="the mean there includes the padded dimensions, whose velocity is the noise",
    )
    # The order of the parameters is that of the export.
    names = dict(zip([name for name, _ in policy.named_parameters()], weights, strict=False))
    differences, largest = {}, max(float(weight.grad.abs().max()) for weight in weights.values() if weight.grad is not None)
    for parameter_name, parameter in policy.named_parameters():
        gradient = weights[names[parameter_name]].grad
        if parameter.requires_grad and not parameter_name.endswith("key.bias"):  # whose gradient is rounding only
            assert gradient is not None
            assert parameter.grad is not None
            scale = max(float(gradient.abs().max()), 1e-6 * largest)
            differences[parameter_name] = float((parameter.grad - gradient).abs().max()) / scale
    worst = max(differences, key=differences.__getitem__)
    quantity = f"gradients: the worst of {len(differences)} parameters"
    parity.compare(name, PEER, quantity, policy.get_parameter(worst).grad, weights[names[worst]].grad)


@pytest.mark.parametrize("dims", [REAL_DIMS, 32], ids=["some dimensions", "all dimensions"])
def test_exported_weights_act_in_openpi_as_here(policy: Policy, dims: int, parity: ParityTable) -> None:
    """With padded dimensions, if their velocity there is the exact one, to which openpi trains them."""
    batch = pi_batch(policy)
    network, inputs, noise = openpi_network(policy), openpi_inputs(policy, batch), batch["noise"][:, 0]
    batch["action_dim_mask"] = (torch.arange(32) < dims).expand(len(noise), -1)

    def velocity(x_t: Tensor, time: Tensor) -> Tensor:
        return torch.where(batch["action_dim_mask"][:, None], network.velocity(inputs, x_t, time), noise)

    with torch.no_grad():
        theirs = openpi.sample_actions(velocity, noise, policy.config.denoising_steps)
    quantity = "actions of weights exported to it"
    if dims == REAL_DIMS:
        quantity = "actions with padded dimensions, whose velocity is exact"
    parity.compare(name_of(policy), PEER, quantity, policy.select_actions(batch), theirs)


def test_times_of_training_are_distributed_as_in_openpi(parity: ParityTable) -> None:
    uniform = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    theirs = torch.from_numpy(openpi.time_quantile(uniform.double().numpy()))
    parity.compare("pi0 and pi05", PEER, "quantiles of the time", time_from_uniform(uniform), theirs)


def test_prompts_have_the_words_of_openpi(policy: Policy) -> None:
    spec = policy.batch_spec()
    tokenizer = ByteTokenizer(spec.text_vocab)
    state = np.array([-1.5, -1.0, -0.999, 0.0, 0.5, 0.9999, 1.0, 7.0])
    bins = state_bins(state, spec.state_bins) if spec.state_in_prompt else None
    tokens, mask = encode_prompt(tokenizer, spec, "  pick_up  the\nblock ", bins)
    text = openpi.prompt_text("  pick_up  the\nblock ", state if spec.state_in_prompt else None)
    assert tokenizer.decode(tokens[mask].tolist()) == text
    assert tokens[0] == tokenizer.bos


def test_states_fall_into_the_bins_of_openpi() -> None:
    state = np.concatenate([np.random.default_rng(0).normal(size=2000), np.linspace(-1, 1, 257)])
    assert state_bins(state, 256).tolist() == openpi.state_numbers(state)


@pytest.mark.parametrize("feature", ["observation.state", "action"])
def test_the_sample_dataset_is_normalised_as_by_openpi(policy: Policy, feature: str, parity: ParityTable) -> None:
    dataset = open_dataset(sample_path())
    mode, quantiles = MODES[name_of(policy)], name_of(policy) == "pi05"
    normaliser = Normaliser(4, mode)
    normaliser.load([dataset.statistics[feature]])
    statistics = {key: torch.tensor(values, dtype=torch.float64) for key, values in dataset.statistics[feature].items()}
    values = torch.from_numpy(dataset.column(feature, 0, len(dataset)))
    index = torch.zeros(len(values), dtype=torch.long)
    ours, theirs = normaliser.normalise(values, index), openpi.normalise(values, statistics, quantiles=quantiles)
    label = feature.removeprefix("observation.")
    parity.compare(name_of(policy), PEER, f"normalised {label} of the sample dataset", ours, theirs)
    restored = openpi.denormalise(theirs, statistics, quantiles=quantiles)
    parity.compare(
        name_of(policy), PEER, f"denormalised {label} of the sample dataset", normaliser.denormalise(ours, index), restored
    )


def sample_frame() -> Tensor:
    """Return an image (3, 51, 64) uint8."""
    return open_dataset(sample_path()).image("corner", 100)[:, :51]


def compare_images(size: tuple[int, int], theirs: Tensor, peer: str, parity: ParityTable) -> None:
    ours = letterbox(sample_frame(), size)
    quantity = f"an image of 51 x 64 pixels resized to {size[0]} x {size[1]}"
    reason = "Pillow and torch round to grey levels differently" if (ours != theirs).any() else ""
    one_level = 1.01 / float(theirs.max())
    parity.compare("pi0 and pi05", peer, quantity, ours, theirs, bound=one_level, reason=reason)
    assert torch.equal(ours.sum(dim=0) == 0, theirs.sum(dim=0) == 0), "black bars"


@pytest.mark.parametrize("size", SIZES)
def test_images_are_resized_as_by_the_formula_of_openpi(size: tuple[int, int], parity: ParityTable) -> None:
    pytest.importorskip("PIL", reason="openpi resizes with Pillow; `pip install benchbox[dev]` has it")
    theirs = openpi.resize_with_pad(sample_frame().permute(1, 2, 0).numpy(), *size)
    compare_images(size, torch.from_numpy(theirs).permute(2, 0, 1), PEER, parity)


@requires_lerobot
def test_images_are_resized_as_by_openpis_own_client(parity: ParityTable, tmp_path: Path) -> None:
    save_file({"image": sample_frame().permute(1, 2, 0).contiguous()}, tmp_path / "image.safetensors")
    (tmp_path / "sizes.json").write_text(json.dumps(SIZES))
    run_script("resize", tmp_path)
    resized = load_file(tmp_path / "resized.safetensors")
    for size in SIZES:
        compare_images(size, resized[f"{size[0]} x {size[1]}"].permute(2, 0, 1), CLIENT_VERSION, parity)


def test_the_mask_of_attention_is_that_of_openpi() -> None:
    """Except that padding attends to itself, because a row without any key is undefined in some kernels."""
    valid = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    starts = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 0])
    groups, positions = starts.cumsum(0), valid.long().cumsum(1) - 1
    ours = AttentionMask(
        query_groups=groups,
        key_groups=groups,
        query_valid=valid,
        key_valid=valid,
        query_positions=positions,
        key_positions=positions,
    )
    padding = torch.diag_embed(~valid)
    assert torch.equal(ours.dense(), openpi.attention_mask(valid, starts) | padding)
