"""Samples of the shipped dataset for pi0 and pi05, prepared here and by lerobot's own reader and processors."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.data import default_collate

from benchbox.data import open_dataset
from benchbox.data.loading.loader import open_samples
from benchbox.data.normalisation import EPS, Normaliser
from benchbox.data.sample import sample_path
from benchbox.data.text.prompt import encode_prompt
from benchbox.data.text.tokenizer import FileTokenizer
from benchbox.spec.cell import DataSpec
from tests.parity.lerobot import VERSION, requires_lerobot, run_script
from tests.parity.pi import PRESETS, build_pi, lerobot_sizes, network_pixels

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from benchbox.data.loading.loader import SampleSource
    from benchbox.registry.contracts import Batch, Policy
    from tests.parity.table import ParityTable

pytestmark = requires_lerobot
INDICES = [0, 60, 209, 371]  # of both tasks; two states below the bins; the chunk of the last runs past the end of its episode
IMAGE_SIZES = [32, 64, 224]  # of 64: shrunk, as they are, enlarged to the published size
CONSTANT_DIM = 1
UNCLEAN_TASK = "door_open\nnow"
TOKENIZER = "google/paligemma-3b-pt-224"  # the name that lerobot opens, as a folder
CAMERAS = ["observation.images.corner", "observation.images.corner2"]


@dataclass(frozen=True)
class Samples:
    """Samples prepared here and by lerobot."""

    policy: Policy
    folder: Path
    batch: Batch
    theirs: dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the outputs of lerobot for all policies."""
    folder = tmp_path_factory.mktemp("processors")
    write_tokenizer(folder / TOKENIZER)
    dataset = open_dataset(sample_path())
    shutil.copytree(sample_path(), folder / "dataset")
    policies = {}
    for name in PRESETS:
        policy = build_pi(name)
        sizes = lerobot_sizes(name, policy) | {"prompt_tokens": policy.batch_spec().prompt_tokens, "image_sizes": IMAGE_SIZES}
        policies[name] = sizes | {"cameras": CAMERAS, "image_size": [64, 64], "state_dim": 4, "action_dim": 4}
    request = {"policies": policies, "indices": INDICES, "fps": dataset.fps, "constant_dim": CONSTANT_DIM, "task": UNCLEAN_TASK}
    (folder / "request.json").write_text(json.dumps(request | {"dataset": str(folder / "dataset")}))
    run_script("processors", folder)
    return folder


@pytest.fixture(scope="module", params=PRESETS)
def samples(request: pytest.FixtureRequest, folder: Path) -> Samples:
    policy = build_pi(request.param)
    policy.load_statistics(dataset_samples(policy, folder).statistics)
    return Samples(policy, folder, make_samples(policy, folder), load_file(folder / f"{request.param}.safetensors"))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes that puts `<bos>` before every text, as PaliGemma's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>", "<bos>"]
    words = {word: i for i, word in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", words["<bos>"])])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def dataset_samples(policy: Policy, folder: Path, image_size: int = 64) -> SampleSource:
    spec = replace(policy.batch_spec(), cameras=2, image_size=(image_size, image_size))
    return open_samples(DataSpec(kind="sample", tokenizer=str(folder / TOKENIZER)), spec, 0)


def make_samples(policy: Policy, folder: Path, image_size: int = 64) -> Batch:
    samples = dataset_samples(policy, folder, image_size)
    return default_collate([samples.sample(0, index) for index in INDICES])


def name_of(samples: Samples) -> str:
    return type(samples.policy).__name__.lower()


def test_frames_and_actions_of_the_dataset_are_read_as_by_lerobot(samples: Samples, parity: ParityTable) -> None:
    name, theirs = name_of(samples), samples.theirs
    frames = torch.stack([theirs[f"raw.{camera}"] for camera in CAMERAS], dim=1)
    parity.compare(name, VERSION, "decoded frames", samples.batch["images"][:, 0].float() / 255, frames)
    parity.compare(name, VERSION, "actions of a chunk", samples.batch["action"][..., :4], theirs["raw.action"])
    padded = theirs["raw.action_is_pad"]
    assert padded.any()
    assert torch.equal(samples.batch["action_is_pad"], padded)


def test_states_and_actions_are_normalised_as_by_lerobot(samples: Samples, parity: ParityTable) -> None:
    name, batch, theirs = name_of(samples), samples.batch, samples.theirs
    policy = samples.policy
    action = policy.action_normaliser.normalise(batch["action"], batch["dataset_index"])[..., :4]
    parity.compare(name, VERSION, "normalised actions", action, theirs["action"])
    restored = policy.action_normaliser.denormalise(torch.nn.functional.pad(theirs["action"], (0, 28)), batch["dataset_index"])
    parity.compare(name, VERSION, "denormalised actions", restored[..., :4], theirs["restored"])
    if name == "pi0":
        state = policy.normalised_states(batch)[:, -1, :4]
        # Deviations are increased by 1e-6 here and in openpi, and by 1e-8 in lerobot.
        bound = EPS / min(open_dataset(sample_path()).statistics["observation.state"]["std"])
        parity.compare(name, VERSION, "normalised state", state, theirs["observation.state"], bound=bound)


def test_prompts_have_the_tokens_of_lerobot(samples: Samples, parity: ParityTable) -> None:
    name, batch, theirs = name_of(samples), samples.batch, samples.theirs
    tokens, mask = theirs["observation.language.tokens"], theirs["observation.language.attention_mask"].bool()
    assert torch.equal(batch["prompt_mask"], mask)
    parity.compare(name, VERSION, "prompt tokens", batch["prompt_tokens"].float(), tokens.float(), bound=0.0)


def test_constant_dimensions_stay_as_they_are_here_and_become_a_constant_in_lerobot(
    samples: Samples, parity: ParityTable
) -> None:
    """-1 by quantiles, 0 by mean and deviation. A value that differs from the constant is divided by 1e-8 there."""
    name, theirs = name_of(samples), samples.theirs
    constant = float(theirs["constant.value"])
    normalised = theirs["constant.observation.state"][:, CONSTANT_DIM]
    expected = torch.full_like(normalised, -1.0 if name == "pi05" else 0.0)
    assert torch.equal(normalised, expected)
    normaliser = Normaliser(1, samples.policy.batch_spec().state_normalisation)
    normaliser.load([{"mean": [constant], "std": [0.0], "q01": [constant], "q99": [constant]}])
    ours = normaliser.normalise(torch.full((len(normalised), 1), constant), torch.zeros(len(normalised), dtype=torch.long))
    reason = "it stays as it is here: a value that differs from the constant is divided by 1e-8 there"
    parity.compare(name, VERSION, "normalised constant dimension", ours[:, 0], normalised, bound=2.0, reason=reason)


def test_tasks_of_pi0_are_cleaned_as_by_openpi_and_not_by_lerobot(samples: Samples) -> None:
    """lerobot passes the task on as it is, and adds a line break unless there is one. In pi05 it cleans it like openpi."""
    theirs, spec = samples.theirs, samples.policy.batch_spec()
    tokenizer = FileTokenizer(samples.folder / TOKENIZER / "tokenizer.json", spec.text_vocab)
    tokens = theirs["task.observation.language.tokens"][0].tolist()
    text = tokenizer.decode(tokens)
    bins = np.zeros(4, dtype=np.int64) if spec.state_in_prompt else None
    ours, mask = encode_prompt(tokenizer, spec, UNCLEAN_TASK, bins)
    expected = tokenizer.decode(ours[mask].tolist())
    if name_of(samples) == "pi0":
        assert (text, expected) == ("door_open\nnow\n", "door open now\n")
    else:
        assert text.startswith("Task: door open now, State: ")
        assert expected.startswith("Task: door open now, State: ")


IMAGE_REASONS = {
    32: "lerobot does not average when it shrinks; openpi does",
    64: "",
    224: "resized images are rounded to grey levels here and in openpi, and not in lerobot",
}


@pytest.mark.parametrize("size", IMAGE_SIZES)
def test_images_are_those_of_lerobot_but_for_the_rounding_and_the_averaging(
    samples: Samples, parity: ParityTable, size: int
) -> None:
    ours = network_pixels(make_samples(samples.policy, samples.folder, size)["images"])
    quantity = f"images of 64 x 64 pixels at {size} x {size}"
    bound = {32: 0.4, 64: 1e-5, 224: 1.01 / 127.5}[size]
    theirs = samples.theirs[f"images.{size}"]
    parity.compare(name_of(samples), VERSION, quantity, ours, theirs, bound=bound, reason=IMAGE_REASONS[size])
