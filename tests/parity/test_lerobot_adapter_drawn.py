"""Policies that the adapter of lerobot builds in drawn configurations, against lerobot's own."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from benchbox.spec.optim import OptimSpec
from tests.parity.drawn_adapter import AdapterDrawing, draw_adapter
from tests.parity.lerobot import ENVIRONMENT, V30_ENVIRONMENT, requires_lerobot, run_script

if TYPE_CHECKING:
    from torch import Tensor

    from tests.parity.table import ParityTable
    from tests.support.environments import Environment

ROOT = Path(__file__).parents[2]
# The diffusion policy needs diffusers, which only the environment of lerobot 0.4 has.
POLICIES = {V30_ENVIRONMENT: ["act", "diffusion"], ENVIRONMENT: ["act", "smolvla", "pi0", "pi05", "pi0_fast"]}
SEEDS = {"act": (0, 1), "diffusion": (0, 5), "smolvla": (1, 3), "pi0": (4, 8), "pi05": (0, 6), "pi0_fast": (0, 3)}
CASES = [
    pytest.param(
        (environment, f"{policy}, drawing {seed}"),
        id=f"{environment.requirements.stem}-{policy}-{seed}",
        marks=pytest.mark.skipif(
            not environment.is_built,
            reason=f"no environment {environment.requirements.stem} in build/parity: `make parity` builds it",
        ),
    )
    for environment, policies in POLICIES.items()
    for policy in policies
    for seed in SEEDS[policy]
]
# pi0-FAST does not act here.
ACTING = [case for case in CASES if "pi0_fast" not in str(case.id)]


class Comparison(NamedTuple):
    """Quantities of a drawn policy: as the adapter builds it, and of lerobot's own."""

    policy: str
    peer: str  # with its version
    drawing: str
    ours: dict[str, Tensor]
    theirs: dict[str, Tensor]
    facts: dict[str, Any]  # names of parameters whose initial weights or gradients differ, and hyperparameters


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Environment, Path]:
    """Folders that the script has written, by environment; filled by `comparison`."""
    return {}


@pytest.fixture
def comparison(
    request: pytest.FixtureRequest, folders: dict[Environment, Path], tmp_path_factory: pytest.TempPathFactory
) -> Comparison:
    environment, name = request.param
    if environment not in folders:
        policies = POLICIES[environment]
        drawings = {f"{policy}, drawing {seed}": draw_adapter(policy, seed) for policy in policies for seed in SEEDS[policy]}
        folders[environment] = run_drawings(drawings, tmp_path_factory.mktemp(environment.requirements.stem), environment)
    tensors = load_file(folders[environment] / "results.safetensors")
    version = next(pin.replace("==", " ") for pin in environment.pinned_packages if pin.startswith("lerobot=="))
    ours, theirs = (
        {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        for prefix in (f"{name}.ours.", f"{name}.theirs.")
    )
    policy, _, drawing = name.partition(", ")
    facts = json.loads((folders[environment] / "results.json").read_text())[name]
    return Comparison(f"lerobot:{policy}", version, drawing, ours, theirs, facts)


def run_drawings(drawings: dict[str, AdapterDrawing], folder: Path, environment: Environment) -> Path:
    """Return the folder into which the script has written its results."""
    request = {name: asdict(drawing) for name, drawing in drawings.items()}
    (folder / "request.json").write_text(json.dumps(request))
    run_script("drawn_adapter", folder, environment, {"PYTHONPATH": str(ROOT)})
    return folder


drawn = pytest.mark.parametrize("comparison", CASES, indirect=True)


@drawn
def test_the_weights_of_a_seed_are_those_of_lerobot(comparison: Comparison) -> None:
    assert comparison.facts["weights"] == []


@drawn
def test_inputs_are_those_of_lerobots_processors(comparison: Comparison) -> None:
    keys = [key for key in comparison.theirs if key.startswith("inputs.")]
    assert len(keys) > 2, "state, action and cameras"
    for key in keys:
        torch.testing.assert_close(comparison.ours[key], comparison.theirs[key], rtol=1e-5, atol=1e-5, msg=key)


@drawn
def test_losses_and_gradients_are_those_of_lerobot(comparison: Comparison, parity: ParityTable) -> None:
    ours, theirs = comparison.ours["loss"], comparison.theirs["loss"]
    parity.compare(comparison.policy, comparison.peer, f"loss, {comparison.drawing}", ours, theirs)
    assert comparison.facts["gradients"] == []


@pytest.mark.parametrize("comparison", ACTING, indirect=True)
def test_actions_are_those_of_lerobot(comparison: Comparison, parity: ParityTable) -> None:
    ours, theirs = comparison.ours["actions"], comparison.theirs["actions"]
    parity.compare(comparison.policy, comparison.peer, f"actions, {comparison.drawing}", ours, theirs)


@drawn
def test_the_documented_hyperparameters_are_the_presets_of_lerobot(comparison: Comparison) -> None:
    name = comparison.policy.removeprefix("lerobot:")
    text = (ROOT / "docs" / "extending" / "policy.md").read_text()
    documented = re.search(rf"^\|(?: `\w+`,)* `{name}`(?:, `\w+`)* \| (?:`(\{{.*\}})`|the defaults)", text, re.MULTILINE)
    assert documented is not None
    optim = OptimSpec(**YAML(typ="safe").load(documented[1] or "{}"))
    preset = comparison.facts["preset"]
    if optim.schedule == "constant":
        del preset["final_lr"]
    assert {key: value for key, value in optim.to_dict().items() if key in preset} == preset


NO_CHECKPOINTING = "its gradient_checkpointing has no effect, `checkpointing` of the matrix has"


@requires_lerobot
def test_a_setting_of_a_preset_that_is_the_default_of_lerobot_is_no_request(tmp_path: Path) -> None:
    config = {"optimizer_betas": [0.9, 0.95], "dtype": "float32", "time_sampling_scale": 0.999, "compile_model": False}
    drawing = draw_adapter("pi0", 4)
    folder = run_drawings({"pi0": replace(drawing, config=drawing.config | config)}, tmp_path, ENVIRONMENT)
    assert "refused" not in json.loads((folder / "results.json").read_text())["pi0"]


@requires_lerobot
def test_what_the_adapter_cannot_give_to_a_policy_is_refused(tmp_path: Path) -> None:
    modes = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    cases = {
        "act": (
            {"normalization_mapping": modes | {"VISUAL": "MIN_MAX"}},
            "its normalization_mapping has MIN_MAX for VISUAL, which is normalised by IDENTITY or MEAN_STD",
        ),
        "smolvla": (
            {"normalization_mapping": modes | {"VISUAL": "MEAN_STD"}},
            "its normalization_mapping has MEAN_STD for VISUAL, which is normalised by IDENTITY",
        ),
        "smolvla with image tokens": (
            {"add_image_special_tokens": True},
            "add_image_special_tokens needs a tokenizer from the model hub",
        ),
        "smolvla of Aloha": ({"adapt_to_pi_aloha": True}, "this adapter does not know its adapt_to_pi_aloha"),
        "pi0": ({"time_sampling_beta_alpha": 2.0}, "this adapter does not know its time_sampling_beta_alpha"),
        "pi05": ({"use_relative_actions": True}, "this adapter does not know its use_relative_actions"),
        "pi05 in bfloat16": ({"dtype": "bfloat16"}, "its dtype has no effect, `recipe` of the matrix has"),
        "pi0_fast": ({"gradient_checkpointing": True}, NO_CHECKPOINTING),
        "act with a rate": ({"optimizer_lr": 1e-4}, "its optimizer_lr has no effect, `optim` of the matrix has"),
    }
    drawings = {name: replace(draw_adapter(name.split()[0], 1), config=config) for name, (config, _) in cases.items()}
    folder = run_drawings(drawings, tmp_path, ENVIRONMENT)
    expected = {
        name: {"refused": f"lerobot:{name.split()[0]} cannot be built here: {reason}"} for name, (_, reason) in cases.items()
    }
    assert json.loads((folder / "results.json").read_text()) == expected
