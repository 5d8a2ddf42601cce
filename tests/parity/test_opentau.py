"""The pi policies and the value function against the formulas of OpenTau, with the same weights, batch, noise and time.

OpenTau is no package that can be installed here: `tests/reference/opentau_*.py` are its formulas. Where ours differ on purpose,
the tests at the end measure by how much; the docstrings of the policies quote them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers

from benchbox.data.lerobot import open_dataset
from benchbox.data.samples import DatasetSamples
from benchbox.data.text import BOS, EOS, ByteTokenizer
from benchbox.registry.contracts import Axes
from tests.reference import opentau_losses as losses
from tests.reference import opentau_prompts as prompts
from tests.reference.opentau_layers import Layers, attention_mask, embed_time, suffix_mask
from tests.support.datasets import annotate, write_dataset
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


@acting
def test_velocity_losses_and_gradients_are_those_of_opentau(name, parity):
    sequence = sequence_of(name)
    policy, batch = sequence.policy, sequence.batch
    velocities = []
    policy.action_out.register_forward_hook(lambda *arguments: velocities.append(arguments[2].detach()))
    result = policy(batch, per_sample=True)
    result.total.backward()

    velocity, target = sequence.flow()
    parity.compare(name, PEER, "velocity", velocities[0], velocity)
    errors = losses.flow_errors(velocity, target, batch["action_is_pad"], batch["action_dim_mask"])
    total, count = result.per_sample["flow"]
    parity.compare(name, PEER, "flow error per sample", total, errors.sum(dim=(1, 2)))
    expert = [key for key, parameter in policy.named_parameters() if "expert" in key or key.startswith(("action_", "time."))]
    reference = torch.autograd.grad((errors.sum(dim=(1, 2)) / count).mean(), [policy.get_parameter(key) for key in expert])
    ours = torch.cat([policy.get_parameter(key).grad.flatten() for key in expert])
    parity.compare(name, PEER, "gradient of expert", ours, torch.cat([grad.flatten() for grad in reference]), bound=1e-4)

    index = len(sequence.parts) - 1
    if name == "pi05_mem":  # predicted by its states: the response, which OpenTau lacks, has padding
        sequence.parts.pop(-2)
        policy, batch = sequence.policy, {**batch, "response_mask": torch.zeros_like(batch["response_mask"])}
        result, index = policy(batch, per_sample=True), index - 1
    fast_errors = losses.token_errors(sequence.logits_before(index, "discrete.head"), batch["fast_tokens"], batch["fast_mask"])
    parity.compare(name, PEER, "FAST cross-entropy per sample", result.per_sample["fast"][0], fast_errors.sum(dim=1))
    assert set(result.parts) == {"flow", "fast", "fast_truncated"} | (
        {"response"} if name in ("pi05", "pi06", "pi05_mem") else set()
    )


@acting
@torch.no_grad()
def test_sampled_actions_are_those_of_opentau(name, parity):
    sequence = sequence_of(name)
    policy, batch = sequence.policy, sequence.batch
    steps = 5 if name in ("pi06", "pi07_low_level") else 10
    action = losses.sample(sequence.velocity, batch["noise"][:, 0], steps)
    action = policy.action_normaliser.denormalise(action, batch["dataset_index"])
    parity.compare(name, PEER, "sampled actions", policy.select_actions(batch), action)


@torch.no_grad()
def test_the_value_function_has_the_losses_of_opentau(parity):
    sequence = sequence_of("value")
    policy, batch = sequence.policy, {**sequence.batch, "returns": -torch.tensor([0.0, 50.0, 203.0, 400.0]) / 400}
    result = policy(batch, per_sample=True)
    bins = torch.tensor([losses.return_bin(steps, 400, policy.config.bins) for steps in (0, 50, 203, 400)])
    states, _ = sequence.run(sequence.parts[:3])  # as OpenTau predicts a value, without a response
    logits = sequence.layers.linear(states[:, -1], "head")
    errors = F.cross_entropy(logits, bins, reduction="none")
    parity.compare("value", PEER, "cross-entropy of value", result.per_sample["value"][0], errors)
    distance = (losses.expected_value(logits) - batch["returns"]).abs().mean()
    parity.compare("value", PEER, "distance of value", result.parts["l1"], distance)
    assert result.parts["accuracy"] == (logits.argmax(dim=-1) == bins).float().mean()
    errors = losses.token_errors(sequence.logits_before(3, "response_head"), batch["response_tokens"], batch["response_mask"])
    parity.compare("value", PEER, "cross-entropy of response", result.per_sample["response"][0], errors.sum(dim=1))


def test_returns_are_in_the_bins_of_opentau():
    """All returns of an episode of 400 steps, and of one of 333, whose returns are not exact in binary."""
    policy = build("value")
    for longest in (400, 333):
        steps = torch.arange(longest + 1)
        expected = [losses.return_bin(int(number), longest, policy.config.bins) for number in steps]
        ours = policy.bin_indices((-steps.double() / longest).float()).tolist()
        exact = [(longest - int(number)) * (policy.config.bins - 1) // longest for number in steps]
        assert ours == exact
        others = [number for number, bin_index in enumerate(expected) if bin_index != exact[number]]
        assert len(others) < 0.02 * longest, "OpenTau's float64 rounds few returns down that are exactly on an edge"
        assert all((longest - number) * (policy.config.bins - 1) % longest == 0 for number in others)


def gemma(policy, kind: str, width: int, mlp: int):
    """Return a random text model of `transformers` with the sizes of a policy's layers, and without windows."""
    backbone = policy.config.model.backbone
    torch.manual_seed(1)
    far = {"rope_type": "linear", "factor": backbone.global_rope_stretch, "rope_theta": backbone.global_rope_base}
    near = {"rope_type": "default", "rope_theta": 1e4}
    kinds = ["full_attention" if (n + 1) % backbone.global_every == 0 else "sliding_attention" for n in range(backbone.depth)]
    later = {
        "query_pre_attn_scalar": backbone.head_dim,
        "sliding_window": 4096,
        "layer_types": kinds,
        "rope_parameters": {"sliding_attention": near, "full_attention": far},
    }
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=policy.config.model.vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=backbone.depth,
        num_attention_heads=backbone.heads,
        num_key_value_heads=backbone.kv_heads,
        head_dim=backbone.head_dim,
        **(later if kind == "gemma3_text" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def test_the_backbone_of_the_reference_is_gemma_3_of_transformers(tmp_path, parity):
    policy = build("pi06")
    backbone = policy.config.model.backbone
    oracle = gemma(policy, "gemma3_text", backbone.width, backbone.mlp)
    oracle.save_pretrained(tmp_path)
    assert policy.load_weights(tmp_path).unexpected == ()
    tokens = torch.randint(3, 300, (2, 40))
    part = text(policy, tokens, None, "causal")
    ours, _ = Sequence(policy, {}, []).run([part])
    parity.compare("pi06", "transformers", "backbone of the reference", ours, oracle.model(input_ids=tokens).last_hidden_state)


@torch.no_grad()
def test_the_expert_of_the_reference_is_gemma_of_transformers_where_its_norms_are_constant(parity):
    """Modulations with scale w, shift 0 and gate 1 are plain norms."""
    policy = build("pi05_mem")
    oracle = gemma(policy, "gemma", policy.config.model.expert.width, policy.config.model.expert.mlp)
    weights = {}
    for name, tensor in oracle.model.state_dict().items():
        key = "model.expert_norm.weight" if name == "norm.weight" else name.replace("layers.", "model.layers.")
        for theirs, ours in EXPERT_NAMES.items():
            key = key.replace(f".{theirs}.", f".expert.{ours}.")
        if "norm" in key:
            module = key.removesuffix("weight") + "modulation"
            weights[f"{module}.weight"] = torch.zeros(3 * len(tensor), len(tensor))
            weights[f"{module}.bias"] = torch.cat((tensor, torch.zeros_like(tensor), torch.ones_like(tensor)))
        else:
            weights[key] = tensor
    hidden = torch.randn(2, 9, policy.config.model.expert.width)
    backbone = policy.config.model.backbone
    empty = [(torch.zeros(2, 0, backbone.kv_heads, backbone.head_dim),) * 2] * backbone.depth
    positions, mask = torch.arange(9).expand(2, -1), torch.ones(2, 9, 9, dtype=torch.bool).tril()
    ours = layers_of(policy, weights=weights).suffix(hidden, torch.zeros(2, hidden.shape[-1]), mask, positions, empty)
    theirs = oracle.model(inputs_embeds=hidden).last_hidden_state
    parity.compare("pi05_mem", "transformers", "expert of the reference", ours, theirs)


TASK, STATE, LONGEST = "push the red block", "observation.state", 200


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Four frames in two episodes: with response, metadata and memory, without response, without metadata, without any."""
    folder = tmp_path_factory.mktemp("opentau")
    root = write_dataset(folder / "plain", lengths=(3, 1), tasks=(TASK, TASK))
    columns = {
        "response": ["grasp it", "", "lift it", ""],
        "metadata.speed": ["3", "4", "", ""],
        "metadata.quality": ["5", "", "", ""],
        "memory": ["saw a block", "block held", "block up", "nothing"],
    }
    return open_dataset(annotate(root, folder / "annotated", columns)), columns


def spoken(policy, batch) -> list[str]:
    """Return the sequence of each sample as text, as the policy runs it; padding is left out."""
    texts, make_text = {}, policy.model.text

    def record(name, tokens, *arguments, **options):
        texts[name] = tokens
        return make_text(name, tokens, *arguments, **options)

    policy.model.text = record
    prefixes = []
    handle = policy.model.register_forward_pre_hook(lambda _, arguments: prefixes.append(arguments[0]))
    with torch.no_grad():
        policy(batch)
    handle.remove()
    policy.model.text = make_text
    (prefix,) = prefixes
    sequences = []
    for sample in range(len(prefix.valid)):
        pieces = []
        for name, span in prefix.spans.items():
            valid = prefix.valid[sample, span]
            if name in texts:
                pieces.append(
                    "".join(MARKS[token] if token in MARKS else chr(token - 3) for token in texts[name][sample][valid].tolist())
                )
            elif valid.any():
                pieces.append(f"[{name.removesuffix(' 0')}]")
        sequences.append("".join(pieces))
    return sequences


MARKS = {BOS: "", EOS: "<eos>"}


@pytest.mark.parametrize("name", [*ACTING, "value", "pi07_high_level"])
def test_the_sequence_of_a_dataset_reads_as_that_of_opentau(dataset, name):
    """The way from the columns of a dataset to the tokens that the policy runs."""
    data, columns = dataset
    torch.manual_seed(0)
    policy = build(name).eval()
    config = replace(policy.config, prompt_tokens=LONGEST, response_tokens=30)
    if name == "pi07_high_level":
        config = replace(config, memory_tokens=20)
    if name in ("pi07_low_level", "pi07_paligemma", "pi07_high_level"):
        config = replace(config, metadata_tokens=20)
    policy = type(policy)(config, Axes()).eval()
    samples = DatasetSamples(data, policy.batch_spec(), seed=0)
    policy.load_statistics(samples.statistics)
    stats = data.statistics[STATE]
    for index in range(4):
        sample = samples.sample(0, index)
        batch = {key: tensor[None] for key, tensor in sample.items()}
        low, high = torch.tensor(stats["q01"]), torch.tensor(stats["q99"])
        normalised = (sample["state"][-1, :3] - low) / (high - low) * 2 - 1
        state = prompts.state_words(normalised.tolist(), lowest=-1 if name == "pi05" else 0)
        response, memory = columns["response"][index], columns["memory"][index]
        metadata = [
            f"{key}: {columns[f'metadata.{key}'][index]}, " for key in ("speed", "quality") if columns[f"metadata.{key}"][index]
        ]
        past = columns["memory"][index - 1] if index in (1, 2) else ""
        context = (TASK, response, metadata)
        expected = {
            "pi05_mem": prompts.pi05_mem(TASK).replace("[fast]", f"{response}<eos>[fast]" if response else "[fast]"),
            "pi05": prompts.pi05(TASK, state, response),
            "pi06": prompts.pi06(TASK, state, response),
            "value": prompts.value(TASK, state, response),
            "pi07_low_level": prompts.pi07_low_level(*context, subgoal=bool(response)),
            "pi07_paligemma": prompts.pi07_paligemma(*context, subgoal=bool(response)),
            "pi07_high_level": prompts.pi07_high_level(TASK, past, state, metadata, memory, response),
        }[name]
        if not response:
            expected = expected.replace("Response: <eos>;\n", "").replace(":<eos>", ":").replace("Subtask: <eos>", "Subtask: ")
        assert spoken(policy, batch) == [expected]


def change(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ours."""
    return float((theirs - ours).norm() / ours.norm())


def begun(policy, part: Part) -> Part:
    """Return the part with the token `<bos>` before it."""
    bos = text(policy, torch.full((4, 1), BOS), None, part.attention)
    return part._replace(hidden=torch.cat((bos.hidden, part.hidden), 1), valid=torch.cat((bos.valid, part.valid), 1))


def packed(*parts: Part) -> Part:
    """Return causal parts as one whose padding is at its end."""
    hidden, valid = torch.cat([part.hidden for part in parts], dim=1), torch.cat([part.valid for part in parts], dim=1)
    order = (~valid).long().argsort(dim=1, stable=True)
    return Part(hidden.gather(1, order[..., None].expand_as(hidden)), valid.gather(1, order), "causal")


def velocity_change(sequence: Sequence, **changes) -> float:
    """Return the change of the velocity with other parts or layers."""
    others = {"parts": sequence.parts, "layers": sequence.layers, **changes}
    return change(sequence.flow()[0], Sequence(sequence.policy, sequence.batch, **others).flow()[0])


def rope_without_stretch() -> float:
    sequence = sequence_of("pi06")
    return velocity_change(sequence, layers=layers_of(sequence.policy, stretches=(1.0,) * len(sequence.layers.stretches)))


def bos_before_response() -> float:
    sequence = sequence_of("pi06")
    image, prompt, response, *later = sequence.parts
    return velocity_change(sequence, parts=[image, prompt, begun(sequence.policy, response), *later])


def dropout() -> float:
    torch.manual_seed(2)
    sequence = sequence_of("pi06")
    return velocity_change(sequence, layers=layers_of(sequence.policy, dropout=partial(F.dropout, p=0.1)))


def states_before_prompt() -> float:
    sequence = sequence_of("pi05_mem")
    image, prompt, state, *later = sequence.parts
    return velocity_change(sequence, parts=[image, state, prompt, *later])


def fast_predicted_by_padding() -> float:
    """Return the change of the first FAST tokens' cross-entropy, where "Actions:" is in the padded field of the response."""
    sequence = sequence_of("pi06")
    image, prompt, response, actions, tokens = sequence.parts
    padded = Sequence(sequence.policy, sequence.batch, [image, prompt, packed(response, actions), tokens])
    first = sequence.batch["fast_tokens"][:, :1]
    errors = [
        losses.token_errors(one.logits_before(len(one.parts) - 1, "discrete.head")[:, :1], first, torch.tensor(True))
        for one in (sequence, padded)
    ]
    return change(*errors)


def response_scaled_twice() -> float:
    sequence = sequence_of("value")
    *before, response = sequence.parts
    scaled = response._replace(hidden=response.hidden * response.hidden.shape[-1] ** 0.5)
    target = sequence.batch["response_tokens"], sequence.batch["response_mask"]
    errors = [
        losses.token_errors(Sequence(sequence.policy, sequence.batch, parts).logits_before(3, "response_head"), *target).sum()
        for parts in (sequence.parts, [*before, scaled])
    ]
    return change(*errors)


def flow_over_the_batch() -> float:
    sequence = sequence_of("pi06")
    velocity, target = sequence.flow()
    masks = sequence.batch["action_is_pad"], sequence.batch["action_dim_mask"]
    ours = sequence.policy(sequence.batch).parts["flow"]
    return change(ours, losses.flow_term(losses.flow_errors(velocity, target, *masks), masks[0], masks[1]))


def text_over_all_positions() -> float:
    sequence = sequence_of("pi06")
    logits = sequence.logits_before(4, "discrete.head")
    errors = losses.token_errors(logits, sequence.batch["fast_tokens"], sequence.batch["fast_mask"])
    return change(sequence.policy(sequence.batch).parts["fast"], losses.text_term(errors))


@pytest.mark.parametrize(
    ("measure", "figure"),
    [
        (rope_without_stretch, 0.011),
        (bos_before_response, 0.004),
        (dropout, 0.06),
        (states_before_prompt, 0.008),
        (fast_predicted_by_padding, 0.07),
        (response_scaled_twice, 0.006),
        (flow_over_the_batch, 0.007),
        (text_over_all_positions, 0.44),
    ],
)
@torch.no_grad()
def test_what_differs_on_purpose_has_the_effect_that_the_docstrings_state(measure, figure):
    assert measure() == pytest.approx(figure, rel=0.25)
