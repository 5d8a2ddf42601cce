"""Policies that the adapter builds from lerobot's package: their losses, against ours and lerobot's own, and their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchbox_policies._layers.weights.export import published_state_dict
from safetensors.torch import load_file, save_file

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from tests.parity.lerobot import VERSION, requires_lerobot, run_script
from tests.parity.pi import CAMERAS, PRESETS, build_pi, lerobot_sizes, pi_batch

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Policy
    from tests.parity.table import ParityTable

pytestmark = requires_lerobot

ROOT = Path(__file__).parents[2]
PUBLISHED = {"pi0": 4_028_019_472, "pi05": 4_143_404_816, "pi0_fast": 3_449_982_704, "smolvla": 450_046_176}
PREFIX = "model."
HEAD = f"{PREFIX}paligemma_with_expert.paligemma.lm_head.weight"
EMBEDDING = f"{PREFIX}paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
UNTIED = 257152 * (2048 + 1024)  # output heads of backbone and expert, which share no weights in lerobot 0.6


@pytest.fixture(scope="module")
def losses() -> dict[str, Tensor]:
    """Losses of our policies, of each sample; filled by `results`."""
    return {}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, losses: dict[str, Tensor]) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("adapter")
    presets = {}
    for name in PRESETS:
        policy = build_pi(name)
        batch = pi_batch(policy)
        presets[name] = adapter_preset(policy, name)
        (folder / name / "weights").mkdir(parents=True)
        save_file(lerobot_state_dict(policy), folder / name / "weights" / "model.safetensors")
        save_file({key: tensor.contiguous() for key, tensor in batch.items()}, folder / name / "batch.safetensors")
        per_sample = policy(batch, per_sample=True).per_sample
        assert per_sample is not None
        sums, counts = per_sample["flow"]
        losses[name] = sums / counts
    (folder / "request.json").write_text(json.dumps({"cameras": CAMERAS, "presets": presets}))
    run_script("adapter", folder, variables={"PYTHONPATH": str(ROOT)})
    return load_file(folder / "results.safetensors")


def lerobot_state_dict(policy: Policy) -> dict[str, Tensor]:
    """Return the weights of one of our policies under the names of lerobot's state dict, which has the text embedding twice."""
    weights = {f"{PREFIX}{name.removeprefix(PREFIX)}": tensor for name, tensor in published_state_dict(policy).items()}
    return weights | {EMBEDDING: weights[HEAD].clone()}


def adapter_preset(policy: Policy, name: str) -> dict[str, Any]:
    """Return the sizes of one of our policies as a preset of the adapter."""
    sizes, spec = lerobot_sizes(name, policy), policy.batch_spec()
    vision = {key: size for key, size in sizes["vision"].items() if key != "projection_dim"}
    return {
        "pixels": spec.image_size[0],
        "dims": spec.action_dim,
        "sizes": {"vision": vision} | {key: sizes[key] for key in ("backbone", "expert", "vocabulary")},
        "config": {
            "chunk_size": spec.horizon,
            "n_action_steps": spec.horizon,
            "tokenizer_max_length": spec.prompt_tokens,
        },
    }


@pytest.mark.parametrize("name", PRESETS)
def test_losses_of_our_weights_are_ours(
    name: str, results: dict[str, Tensor], losses: dict[str, Tensor], parity: ParityTable
) -> None:
    """A camera is missing, and 25 dimensions of state and action."""
    quantity = f"loss of each sample, `lerobot:{name}`"
    parity.compare(name, VERSION, quantity, losses[name], results[f"{name}.loss"])


@pytest.mark.parametrize("name", ["pi0_fast", "smolvla"])
def test_the_loss_is_that_of_lerobots_own_forward(name: str, results: dict[str, Tensor]) -> None:
    """The batches have padded steps, and the same noise and time."""
    torch.testing.assert_close(results[f"{name}.adapter"], results[f"{name}.lerobot"], rtol=1e-6, atol=0)


def test_tokens_of_actions_are_those_of_lerobots_processor_without_its_texts(results: dict[str, Tensor]) -> None:
    """The first one is `<bos>`, so that lerobot predicts every token of the FAST tokenizer."""
    ours, theirs = results["pi0_fast.tokens"]
    assert torch.equal(ours, theirs)
    assert len(set(ours[:, 0].tolist())) == 1


@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_a_camera_that_a_sample_lacks_does_not_reach_its_actions(name: str, results: dict[str, Tensor]) -> None:
    """The second sample has the camera."""
    image, inverted = results[f"{name}.acted"]
    assert torch.equal(image[0], inverted[0])
    assert not torch.equal(image[1], inverted[1])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_full_size_is_the_published_one(name: str, results: dict[str, Tensor]) -> None:
    assert int(results[f"{name}.numel"]) == PUBLISHED[name]


def test_untied_heads_are_all_that_pi0_has_more_than_ours() -> None:
    with torch.device("meta"):
        ours = build_policy("pi0", "full", Axes())
    assert sum(parameter.numel() for parameter in ours.parameters()) == PUBLISHED["pi0"] - UNTIED
