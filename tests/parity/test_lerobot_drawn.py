"""pi0 and pi05 in drawn configurations against lerobot's own package: losses, gradients, actions and checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from benchbox_policies._layers.families.flow import interpolate, time_from_uniform
from benchbox_policies._layers.weights.export import published_state_dict
from safetensors.torch import load_file, save_file

from tests.parity.drawn import Drawing, build_drawn, draw
from tests.parity.lerobot import VERSION, requires_lerobot, run_script
from tests.parity.pi import lerobot_batch, lerobot_gradients, lerobot_sizes, predicting_padding

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchbox.registry.contracts import Batch, Policy
    from tests.parity.table import ParityTable

pytestmark = requires_lerobot
SEEDS = range(6)


class Outputs(NamedTuple):
    """A drawn policy and its batch, and the folder with lerobot's outputs."""

    drawing: Drawing
    policy: Policy
    batch: Batch
    folder: Path

    @property
    def theirs(self) -> dict[str, Tensor]:
        return load_file(self.folder / "results.safetensors")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outputs]:
    root, outputs = tmp_path_factory.mktemp("drawn"), {}
    for seed in SEEDS:
        drawing, folder = draw(seed), root / str(seed)
        policy, batch = build_drawn(drawing)
        dims = {"state_dims": drawing.state_dims, "action_dims": drawing.action_dims}
        (folder / "weights").mkdir(parents=True)
        save_file(published_state_dict(policy), folder / "weights" / "model.safetensors")
        save_file(lerobot_batch(batch, cameras=drawing.present, **dims), folder / "batch.safetensors")
        (folder / "request.json").write_text(json.dumps(lerobot_sizes(drawing.policy, policy, **dims)))
        outputs[seed] = Outputs(drawing, policy, batch, folder)
    run_script("pi", root)
    return outputs


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_elements_and_gradients_are_those_of_lerobot(seed: int, outputs: dict[int, Outputs], parity: ParityTable) -> None:
    drawing, policy, batch, folder = outputs[seed]
    theirs = outputs[seed].theirs
    velocities: list[Tensor] = []
    hook = policy.action_out.register_forward_hook(lambda module, inputs, output: velocities.append(output.detach()))
    policy.zero_grad()
    policy(batch).total.backward()
    hook.remove()
    _, target = interpolate(batch["action"], batch["noise"][:, 0], time_from_uniform(batch["uniform"][:, 0]))
    elements = (velocities[0] - target).square()
    parity.compare(drawing.policy, VERSION, f"loss elements, drawing {seed}", elements, theirs["elements"])

    gradients = lerobot_gradients(theirs, json.loads((folder / "results.json").read_text())["without_gradient"])
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            # What does not act, such as the keys of a single token, has gradients of rounding.
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize("seed", SEEDS)
def test_exported_weights_act_in_lerobot_as_here(seed: int, outputs: dict[int, Outputs], parity: ParityTable) -> None:
    drawing, policy, batch, _ = outputs[seed]
    actions = policy.select_actions(predicting_padding(batch))[..., : drawing.action_dims]
    parity.compare(drawing.policy, VERSION, f"actions, drawing {seed}", actions, outputs[seed].theirs["actions"])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_checkpoint_of_lerobot_is_exported_bit_for_bit(seed: int, outputs: dict[int, Outputs]) -> None:
    """But for the output head, which is the text embedding here, and that of the expert, which nothing uses."""
    drawing, _, _, folder = outputs[seed]
    policy, _ = build_drawn(drawing)
    policy.load_weights(folder / "trained")
    saved = load_file(folder / "trained" / "model.safetensors")
    exported = {f"model.{name}": tensor for name, tensor in published_state_dict(policy).items()}
    differing = [name for name, tensor in exported.items() if not torch.equal(tensor, saved[name])]
    assert {name.rpartition("lm_head")[1] for name in differing} <= {"lm_head"}
    assert [name for name in saved.keys() - exported.keys() if not name.endswith("language_model.embed_tokens.weight")] == []
