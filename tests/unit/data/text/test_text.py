"""Text becomes tokens without any file, and the state in a prompt is never cut."""

from dataclasses import replace

import numpy as np
import pytest

from benchbox.data.text.prompt import (
    BOS,
    EOS,
    PAD,
    ByteTokenizer,
    encode_cues,
    encode_prompt,
    encode_target,
    pad_tokens,
    state_bins,
)
from benchbox.errors import ConfigurationError


def test_any_text_comes_back():
    tokenizer = ByteTokenizer(259)
    text = "öffne die Schublade, 開ける\n"
    assert tokenizer.decode([BOS, *tokenizer.encode(text), EOS, PAD, PAD]) == text
    assert max(tokenizer.encode("\xff" + chr(0x10FFFF))) < 259


def test_a_vocabulary_without_room_for_every_byte_is_refused():
    with pytest.raises(ConfigurationError, match="text_vocab is 258, and the byte tokenizer has 259"):
        ByteTokenizer(258)


def test_bins_divide_minus_one_to_one_and_what_lies_below_them_is_minus_one():
    state = np.array([-5, -1, -1 + 1e-6, -0.001, 0, 0.999, 1, 5])
    assert state_bins(state, 256).tolist() == [-1, 0, 0, 127, 128, 255, 255, 255]
    states = np.random.default_rng(0).uniform(-1.5, 1.5, 1000)
    edges = np.linspace(-1, 1, 257)[:-1]
    below_edges = np.nextafter(edges.astype(np.float32), np.float32(-2))
    for values in (states, edges, below_edges):
        assert (state_bins(values, 256) == np.digitize(values, edges) - 1).all(), "as openpi and LeRobot count"


@pytest.mark.parametrize(
    ("texts", "state", "text"),
    [
        ({}, None, "pick up the cup\n"),  # as pi0 of openpi
        ({"prompt_end": "Action: "}, [12, 255], "Task: pick up the cup, State: 12 255;\nAction: "),  # as pi05 of openpi
        ({"cues": {"action": "Action: "}}, [12, 255], "Task: pick up the cup, State: 12 255;\n"),
        ({"cues": {"action": "Action: "}}, None, "Task: pick up the cup\n"),
        ({"prompt_end": "Action: "}, None, "Task: pick up the cup\nAction: "),
        ({"prompt_template": "Do {task}, ", "cues": {"action": "Action: "}}, None, "Do pick up the cup, "),
    ],
)
def test_the_words_of_a_prompt_follow_from_what_the_policy_asks_for(spec, texts, state, text):
    spec = replace(spec, **{"cues": {}, **texts})
    tokens, mask = encode_prompt(ByteTokenizer(259), spec, "pick_up the\ncup", state and np.array(state))
    assert tokens[mask].tolist() == [BOS, *ByteTokenizer(259).encode(text)]


def test_a_template_has_the_token_of_the_end_the_state_and_as_much_of_the_memory_as_is_generated(spec):
    tokenizer = ByteTokenizer(259)
    template = "Task: {task}<eos>Past: {memory}, State: {state}<eos>"
    spec = replace(spec, prompt_template=template, memory_tokens=6, prompt_tokens=60)
    tokens, mask = encode_prompt(tokenizer, spec, "reach {state}<eos>", np.array([12, 255]), "saw {task} there")
    before, after = tokenizer.encode("Task: reach {state}<eos>"), tokenizer.encode("Past: saw {t, State: 12 255")
    assert tokens[mask].tolist() == [BOS, *before, EOS, *after, EOS]
    tokens, mask = encode_prompt(tokenizer, spec, "reach " * 20, np.array([12, 255]), "saw it there")
    assert mask.all()
    assert tokens.tolist()[-len(after) - 1 :] == [*tokenizer.encode("Past: saw it, State: 12 255"), EOS]


def test_a_long_task_gives_way_to_the_state(spec):
    tokenizer = ByteTokenizer(259)
    spec = replace(spec, prompt_tokens=64, prompt_end="Action: ")
    tokens, mask = encode_prompt(tokenizer, spec, "pick  up\nthe_cup " * 20, np.array([12, 255]))
    text = tokenizer.decode(tokens[mask].tolist())
    assert len(tokens) == 64
    assert mask.all()
    assert text.startswith("Task: pick  up the cup pick")
    assert text.endswith(", State: 12 255;\nAction: ")


def test_a_prompt_without_room_for_the_state_is_refused(spec):
    with pytest.raises(ConfigurationError, match="prompt_tokens is 20, and the prompt takes"):
        encode_prompt(ByteTokenizer(259), replace(spec, prompt_tokens=20), "reach", np.array([12, 255]))


def test_a_text_to_learn_ends_with_its_end_and_an_empty_one_is_masked():
    tokenizer = ByteTokenizer(259)
    tokens, mask = encode_target(tokenizer, "grasp", 8)
    assert tokens.tolist() == [*tokenizer.encode("grasp"), EOS, PAD, PAD]
    assert mask.tolist() == [True] * 6 + [False] * 2
    assert not encode_target(tokenizer, "", 8)[1].any()


def test_a_text_to_read_has_the_words_of_its_template_and_an_empty_one_has_none():
    tokenizer = ByteTokenizer(259)
    tokens, mask = encode_target(tokenizer, "grasp", 20, "Subtask: {text}, ")
    assert tokens[mask].tolist() == tokenizer.encode("Subtask: grasp, ")
    assert not encode_target(tokenizer, "", 20, "Subtask: {text}, ")[1].any()


def test_what_lies_below_the_bins_is_in_the_first_one_if_the_policy_asks_so():
    assert state_bins(np.array([-5, -1, 0, 5]), 256, lowest=0).tolist() == [0, 0, 128, 255]


def test_cues_are_the_words_of_the_spec(spec):
    tokenizer = ByteTokenizer(259)
    cue_tokens = encode_cues(replace(spec, cues={"memory": "Updated Memory: ", "response": "Subtask: "}), tokenizer)
    texts = {name: tokenizer.decode(tokens.tolist()) for name, tokens in cue_tokens.items()}
    assert texts == {"memory_cue_tokens": "Updated Memory: ", "response_cue_tokens": "Subtask: "}


def test_padding_cuts_what_is_too_long():
    tokens, mask = pad_tokens([7, 8, 9], 2, pad=5)
    assert (tokens.tolist(), mask.tolist()) == ([7, 8], [True, True])
    tokens, mask = pad_tokens([7], 3, pad=5)
    assert (tokens.tolist(), mask.tolist()) == ([7, 5, 5], [True, False, False])
