"""A tokenizer of Hugging Face is read from a file, and its special tokens are its own."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchbox.data import open_dataset
from benchbox.data.loading.loader import open_stream
from benchbox.data.samples.windows import DatasetSamples
from benchbox.data.text.prompt import ByteTokenizer, encode_prompt, encode_target
from benchbox.data.text.tokenizer import FileTokenizer, open_tokenizer
from benchbox.errors import ConfigurationError, DataError
from benchbox.spec.cell import DataSpec

WORDS = ["Task: push the red block, State: 12 255;\n", "open the drawer\n", "Action: Subtask: grasp the handle"]


def write_tokenizer(folder, *, special=("<pad>", "<eos>", "<bos>"), config=None):
    """Byte-pair encoding over bytes, whose file asks for a begin before every text, for padding and for truncation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    if "<bos>" in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(3)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def test_text_comes_back_and_nothing_is_added_cut_or_padded(tmp_path):
    tokenizer = FileTokenizer(write_tokenizer(tmp_path), 300)
    text = "Task: push the öld block, State: 12 255;\n"
    ids = tokenizer.encode(text)
    assert 3 < len(ids) < len(text)
    assert not {tokenizer.pad, tokenizer.bos, tokenizer.eos} & set(ids)
    assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos, tokenizer.pad]) == text


def test_a_prompt_is_encoded_in_one_piece_after_the_tokenizers_own_begin(tmp_path, spec):
    tokenizer = FileTokenizer(write_tokenizer(tmp_path), 300)
    assert (tokenizer.pad, tokenizer.eos, tokenizer.bos) == (0, 1, 2)
    tokens, mask = encode_prompt(tokenizer, spec, "push the red block", np.array([12, 255]))
    assert tokens[mask].tolist() == [2, *tokenizer.encode("Task: push the red block, State: 12 255;\n")]
    assert tokens[~mask].tolist() == [0] * (~mask).sum()
    assert encode_target(tokenizer, "open", 20)[0].tolist()[len(tokenizer.encode("open"))] == 1


def test_the_file_beside_it_names_its_special_tokens(tmp_path):
    """A token is a string, or an object with its settings as transformers writes it; null means no such token."""
    config = {"bos_token": None, "eos_token": {"content": "<end>", "lstrip": False}, "pad_token": "<fill>"}
    tokenizer = FileTokenizer(write_tokenizer(tmp_path, special=("<bos>", "<fill>", "<end>"), config=config), 300)
    assert (tokenizer.pad, tokenizer.eos, tokenizer.bos) == (1, 2, None)


@pytest.mark.parametrize(
    ("special", "expected"),
    [(("</s>", "<s>", "[PAD]"), (2, 0, 1)), (("<x>", "<|endoftext|>"), (1, 1, None)), (("<x>",), (0, None, None))],
)
def test_a_lone_file_is_searched_for_the_usual_names(tmp_path, special, expected):
    tokenizer = FileTokenizer(write_tokenizer(tmp_path, special=special), 300)
    assert (tokenizer.pad, tokenizer.eos, tokenizer.bos) == expected


def test_a_tokenizer_that_transformers_saved_is_read_with_the_same_ids(tmp_path):
    from transformers import PreTrainedTokenizerFast

    path = write_tokenizer(tmp_path / "made")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    theirs.save_pretrained(tmp_path / "saved")
    ours = FileTokenizer(tmp_path / "saved/tokenizer.json", 300)
    assert ours.encode(WORDS[0]) == theirs.encode(WORDS[0], add_special_tokens=False)
    assert (ours.pad, ours.eos, ours.bos) == (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id)


@pytest.mark.parametrize("further", [{}, {"add_bos_token": None}])
@pytest.mark.parametrize("special", ["<bos>", "<s>"])
def test_a_text_begins_as_with_transformers_where_the_file_beside_it_names_a_begin(tmp_path, spec, special, further):
    """The tokenizer puts it before a text, or, like SmolVLM's, does not."""
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special, "pad_token": "<pad>", **further}
    path = write_tokenizer(tmp_path, special=("<pad>", special), config=config)
    tokens, mask = encode_prompt(FileTokenizer(path, 300), replace(spec, prompt_end=""), "open the drawer", None)
    theirs = AutoTokenizer.from_pretrained(tmp_path).encode("open the drawer\n", truncation=False)
    assert tokens[mask].tolist() == theirs
    assert (theirs[0] == 1) == (special == "<bos>")


def test_ids_beyond_the_vocabulary_of_the_policy_are_refused(tmp_path):
    path = write_tokenizer(tmp_path)
    assert max(Tokenizer.from_file(str(path)).get_vocab().values()) == 299
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json: has ids up to 299, and the policy's text_vocab is 299"):
        FileTokenizer(path, 299)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"tokenizer.json": "{}"}, r"tokenizer\.json: not readable as a tokenizer \("),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json: not a tokenizer's configuration \("),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json: not a tokenizer's configuration \("),
        (
            {"tokenizer_config.json": '{"eos_token": "<end>"}'},
            r"tokenizer_config\.json: eos_token is '<end>', which the tokenizer beside it lacks",
        ),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, damage, says):
    path = write_tokenizer(tmp_path)
    for name, text in damage.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says) as caught:
        FileTokenizer(path, 300)
    assert "\n" not in str(caught.value)


def test_without_a_file_bytes_are_tokens():
    assert isinstance(open_tokenizer(None, 300), ByteTokenizer)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_reads_every_text_by_the_tokenizer_that_the_data_names(dataset_root, spec, tmp_path, workers):
    path = write_tokenizer(tmp_path)
    spec = replace(spec, cues={"action": "Action: "})
    data = DataSpec(kind="lerobot", path=str(dataset_root), workers=workers, tokenizer=str(tmp_path))  # its folder
    stream = open_stream(data, spec, batch=2, accumulation=1, rank=0, world_size=1, seed=0)
    batch = next(stream)
    stream.close()
    tokenizer = FileTokenizer(path, 300)
    for tokens, mask in zip(batch["prompt_tokens"], batch["prompt_mask"], strict=True):
        assert tokens[0] == tokenizer.bos
        assert tokenizer.decode(tokens[mask].tolist()).startswith(
            ("Task: push the red block, State: ", "Task: open the drawer, ")
        )
    assert batch["action_cue_tokens"].tolist() == [tokenizer.encode("Action: ")] * 2


def test_samples_with_a_tokenizer_can_be_sent_to_other_processes(dataset_root, spec, tmp_path):
    samples = DatasetSamples(open_dataset(dataset_root), spec, 0, write_tokenizer(tmp_path))
    sent = pickle.loads(pickle.dumps(samples))
    assert sent.sample(0, 3)["prompt_tokens"].tolist() == samples.sample(0, 3)["prompt_tokens"].tolist()
