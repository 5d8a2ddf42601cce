"""Sequences of the pi policies and the value function in OpenTau's layout, and the model of `tests/reference` that runs them.

OpenTau is no package that can be installed here: `tests/reference/opentau_*.py` are its formulas.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from benchbox.data.text.prompt import ByteTokenizer
from tests.reference.opentau_layers import Layers, attention_mask, embed_time, suffix_mask
from tests.support.policy_batches import build, make_batch

if TYPE_CHECKING:
    from torch import Tensor

PEER = "formulas of OpenTau"
ACTING = ("pi05", "pi06", "pi05_mem", "pi07_low_level", "pi07_paligemma")
acting = pytest.mark.parametrize("name", ACTING)


class Part(NamedTuple):
    """A part of the prefix: embeddings (B, L, W), which are real (B, L), and where groups of attention start.

    `continue`, `bidirectional`: nowhere, or at its first token; `causal`: at every token.
    """

    hidden: Tensor
    valid: Tensor
    attention: str
    is_read: bool = True  # by the expert

    @property
    def starts(self) -> Tensor:
        order = torch.arange(self.hidden.shape[1])
        return {"continue": order < 0, "bidirectional": order == 0, "causal": order >= 0}[self.attention]


def layers_of(policy, **changes) -> Layers:
    """Return the reference layers with the weights of a policy."""
    backbone = policy.config.model.backbone
    is_global = [(layer + 1) % backbone.global_every == 0 for layer in range(backbone.depth)]
    values = {
        "weights": dict(policy.named_parameters()),
        "heads": backbone.heads,
        "head_dim": backbone.head_dim,
        "bases": tuple(1e6 if far and backbone.global_rope_base else 1e4 for far in is_global),
        "stretches": tuple(backbone.global_rope_stretch if far else 1.0 for far in is_global),
    }
    return Layers(**(values | changes))


class Sequence:
    """The prefix of one policy and batch in OpenTau's layout, run through the reference layers."""

    def __init__(self, policy, batch, parts: list[Part], layers: Layers | None = None) -> None:
        self.policy, self.batch, self.parts = policy, batch, parts
        self.layers = layers or layers_of(policy)

    def run(self, parts: list[Part]):
        """Return the final states of these parts, and keys and values."""
        valid = torch.cat([part.valid for part in parts], dim=1)
        mask = attention_mask(torch.cat([part.starts for part in parts]), valid)
        return self.layers.prefix(torch.cat([part.hidden for part in parts], dim=1), mask, valid.cumsum(dim=1) - 1)

    @property
    def read(self) -> list[Part]:
        return [part for part in self.parts if part.is_read]

    def velocity(self, x_t: Tensor, time: Tensor) -> Tensor:
        """Return the velocity (B, N, A) of noisy actions, with the prefix that the expert reads alone, and detached."""
        valid = torch.cat([part.valid for part in self.read], dim=1)
        _, cache = self.run(self.read)
        cache = [(key.detach(), value.detach()) for key, value in cache]
        hidden = self.layers.linear(x_t, "action_in")
        condition = F.silu(self.layers.linear(embed_time(time, hidden.shape[-1]), "time.inner"))
        condition = F.silu(self.layers.linear(condition, "time.outer"))
        positions = valid.sum(dim=1, keepdim=True) + torch.arange(x_t.shape[1])
        out = self.layers.suffix(hidden, condition, suffix_mask(valid, x_t.shape[1]), positions, cache)
        return self.layers.linear(out, "action_out")

    def flow(self) -> tuple[Tensor, Tensor]:
        """Return the predicted velocity of the training step, and its target."""
        noise, batch = self.batch["noise"][:, 0], self.batch
        action = self.policy.action_normaliser.normalise(batch["action"], batch["dataset_index"])
        time = batch["uniform"][:, 0] ** (1 / 1.5) * 0.999 + 0.001
        t = time[:, None, None]
        return self.velocity(t * noise + (1 - t) * action, time), noise - action

    def logits_before(self, index: int, head: str) -> Tensor:
        """Return the logits (B, L, V) of the tokens of a part, from the positions one before them, padding or not."""
        states, _ = self.run(self.parts)
        ends = torch.tensor([0, *(part.hidden.shape[1] for part in self.parts)]).cumsum(dim=0).tolist()
        start, stop = list(pairwise(ends))[index]
        return self.layers.linear(states[:, start - 1 : stop - 1], head)


def text(policy, tokens: Tensor, valid: Tensor | None, attention: str) -> Part:
    table = policy.model.vocabulary.weight
    hidden = table[tokens] * table.shape[1] ** 0.5
    return Part(hidden, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid, attention)


def field(policy, batch, name: str, attention: str) -> Part:
    return text(policy, batch[f"{name}_tokens"].flatten(1), batch[f"{name}_mask"].flatten(1), attention)


def words(policy, string: str, attention: str) -> Part:
    """Return a fixed text, of every sample of a batch of 4."""
    return text(policy, torch.tensor(ByteTokenizer(384).encode(string)).expand(4, -1), None, attention)


def fast(policy, batch) -> Part:
    return Part(policy.discrete.embedding.weight[batch["fast_tokens"]], batch["fast_mask"], "causal", is_read=False)


def states(policy, batch, attention: str) -> Part:
    normalised = policy.state_normaliser.normalise(batch["state"], batch["dataset_index"])
    return Part(layers_of(policy).linear(normalised, "state_in"), batch["history_mask"], attention)


def images(policy, batch) -> Part:
    block = policy.model.images("images", batch["images"], batch["image_mask"])
    return Part(block.hidden, block.valid, "continue")


def subgoals(policy, batch) -> list[Part]:
    """Return one part per camera."""
    parts = []
    for camera in range(policy.cameras):
        one = slice(camera, camera + 1)
        block = policy.model.images("", batch["subgoal_images"][:, None, one], batch["subgoal_mask"][:, None, one])
        parts.append(Part(block.hidden, block.valid, "bidirectional"))
    return parts


def pi06(policy, batch) -> list[Part]:
    texts = [field(policy, batch, name, "causal") for name in ("prompt", "response")]
    return [images(policy, batch), *texts, words(policy, "Actions:", "causal"), fast(policy, batch)]


def pi05(policy, batch) -> list[Part]:
    response = [words(policy, "Response: ", "causal"), field(policy, batch, "response", "causal")]
    action = [words(policy, "Action: ", "causal")._replace(is_read=False), fast(policy, batch)]
    return [images(policy, batch), field(policy, batch, "prompt", "continue"), *response, *action]


def pi05_mem(policy, batch) -> list[Part]:
    together = [images(policy, batch), field(policy, batch, "prompt", "continue"), states(policy, batch, "continue")]
    return [*together, field(policy, batch, "response", "causal"), fast(policy, batch)]


def pi07_low_level(policy, batch) -> list[Part]:
    causal, named = partial(words, policy, attention="causal"), partial(field, policy, batch, attention="causal")
    return [
        *(images(policy, batch), named("prompt"), causal("State: "), states(policy, batch, "bidirectional"), causal(", ")),
        *(named("response"), causal("Metadata: "), named("metadata"), causal(";\n ")),
        *(causal("Subgoal: "), *subgoals(policy, batch), causal(", ")),
        *(causal("Action: ")._replace(is_read=False), fast(policy, batch)),
    ]


def pi07_paligemma(policy, batch) -> list[Part]:
    flat, named = partial(words, policy, attention="continue"), partial(field, policy, batch)
    return [
        *(images(policy, batch), named("prompt", "continue"), flat("State: "), states(policy, batch, "continue")),
        *(flat(", "), named("response", "bidirectional")),
        *(flat(", "), words(policy, "Metadata: ", "bidirectional"), named("metadata", "continue")),
        *(flat(", "), words(policy, "Subgoal: ", "bidirectional")),
        *(part._replace(attention="continue") for part in subgoals(policy, batch)),
        *(flat(":\n"), words(policy, "Action: ", "causal")._replace(is_read=False), fast(policy, batch)),
    ]


def value(policy, batch) -> list[Part]:
    token = Part(policy.token.weight.expand(4, 1, -1), torch.ones(4, 1, dtype=torch.bool), "causal")
    prompt = field(policy, batch, "prompt", "continue")
    return [images(policy, batch), prompt, token, field(policy, batch, "response", "causal")]


EXPERT_NAMES = {  # those of transformers: ours
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
LAYOUTS = {
    "pi05": pi05,
    "pi06": pi06,
    "pi05_mem": pi05_mem,
    "pi07_low_level": pi07_low_level,
    "pi07_paligemma": pi07_paligemma,
    "value": value,
}


def complete(name: str):
    """Return a policy with two cameras, in validation, and a batch in which every sample has everything, with padded texts."""
    torch.manual_seed(0)
    policy = build(name, cams=2)
    batch = make_batch(policy.batch_spec(), 4)
    for key in ("subgoal_mask", "metadata_mask", "image_mask", "history_mask"):
        if key in batch:
            batch[key] = torch.ones_like(batch[key])
    if "response_mask" in batch:
        lengths = torch.tensor([[3], [8], [1], [5]])
        batch["response_mask"] = torch.arange(batch["response_mask"].shape[1]) < lengths
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # every parameter: gates of adaRMS start at 0, and small weights hide differences
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy.eval(), batch


def sequence_of(name: str) -> Sequence:
    policy, batch = complete(name)
    return Sequence(policy, batch, LAYOUTS[name](policy, batch))
