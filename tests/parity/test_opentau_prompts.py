"""The sequences of a dataset as OpenTau writes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.loading.loader import open_samples
from benchbox.data.text.prompt import BOS, EOS
from benchbox.registry.contracts import Axes
from benchbox.spec.cell import DataSpec
from tests.parity.opentau import (
    ACTING,
)
from tests.reference import opentau_prompts as prompts
from tests.support.datasets import annotate, write_dataset
from tests.support.policy_batches import build

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
    samples = open_samples(DataSpec(kind="lerobot", path=str(data.root)), policy.batch_spec(), 0)
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
