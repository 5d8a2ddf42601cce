"""Responses that a policy generates while it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from benchbox_policies._layers.sequence.token_sequence import concat_blocks

from tests.support.policy_batches import POLICIES, build

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.contracts import Batch, Policy

GENERATING = [name for name in POLICIES if build(name).batch_spec().response_generated]
NEVER = torch.tensor([-1])  # no token ends a response
LENGTH = 8


@pytest.fixture
def varied(awake: Callable[..., tuple[Policy, Batch]]) -> Callable[..., tuple[Policy, Batch]]:
    """Return `awake` whose policies predict other tokens than the last one, which a small network with tied weights repeats."""

    def varied(name: str = "pi05", **axes: object) -> tuple[Policy, Batch]:
        policy, batch = awake(name, **axes)
        with torch.no_grad():
            for layer in policy.model.layers:
                layer.backbone.mlp.down.weight *= 100
                layer.backbone.output.weight *= 10
        return policy, batch

    return varied


def predict(policy: Policy, batch: Batch, position: int) -> torch.Tensor:
    """Return the most likely token at a position of the response, as its loss is computed: from a pass over everything."""
    batch, present = policy.prepare_batch(batch, acting=True)
    prefix = concat_blocks(policy.blocks(batch, present))
    hidden, _ = policy.model.run_prefix(prefix)
    before = hidden[torch.arange(len(hidden)), prefix.predictor_indices("response")[:, position]]
    return policy.model.vocabulary(policy.model.norm(before)[:, None], predict=True)[:, 0]


def most_likely(policy: Policy, batch: Batch, generated: Batch) -> torch.Tensor:
    """Return, for each token of a response, the most likely one after those before it."""
    mask = torch.ones_like(generated["response_mask"])
    given = {**batch, "response_tokens": generated["response_tokens"], "response_mask": mask}
    return torch.stack([predict(policy, given, position) for position in range(LENGTH)], dim=1)


def test_the_policies_that_learn_a_response_and_act_generate_it():
    assert sorted(GENERATING) == ["pi05", "pi05_mem", "pi06"]


@pytest.mark.parametrize("name", GENERATING)
def test_each_token_is_the_most_likely_one_after_those_before_it(name, varied):
    """Prompts differ in length, and no sample sees the padding of another one."""
    policy, batch = varied(name, cams=2)
    batch["prompt_mask"][1, 40:] = False
    generated = policy.generate_response(batch, NEVER)
    assert generated["response_mask"].all()
    assert torch.equal(generated["response_tokens"], most_likely(policy, batch, generated))
    assert len(generated["response_tokens"].unique()) > 1, "equal tokens would show little"
    changed = policy.generate_response({**batch, "response_tokens": batch["response_tokens"] + 1}, NEVER)
    assert torch.equal(changed["response_tokens"], generated["response_tokens"]), "what a batch has as response is ignored"


@pytest.mark.parametrize("name", GENERATING)
def test_a_response_ends_with_the_words_that_follow_it_in_training(name, varied):
    policy, batch = varied(name)
    free = policy.generate_response(batch, NEVER)["response_tokens"]
    end = torch.tensor([int(free[0, 2]), 5, 6])
    generated = policy.generate_response(batch, end)
    for row, mask, before in zip(generated["response_tokens"], generated["response_mask"], free, strict=True):
        found = (before == end[0]).nonzero()
        stop = int(found[0]) if len(found) else LENGTH
        expected = [*before[:stop].tolist(), *end.tolist()][:LENGTH] if len(found) else before.tolist()
        assert row[mask].tolist() == expected
        assert not mask[len(expected) :].any()


@pytest.mark.parametrize(("predicted", "written"), [(8, 8), (7, 8), (5, 7)])
def test_a_response_that_fills_its_room_is_cut_as_in_training(predicted, written, awake):
    """The head predicts so many tokens, the last of which ends the response."""
    policy, batch = awake()
    ids = iter([*range(10, 9 + predicted), 2])
    policy.token_head = lambda _: lambda hidden, predict: torch.full((len(hidden), 1), next(ids))
    generated = policy.generate_response(batch, torch.tensor([2, 5, 6]))
    expected = [*range(10, 9 + predicted), 2, 5, 6][:LENGTH]
    assert len(expected) == written
    for row, mask in zip(generated["response_tokens"], generated["response_mask"], strict=True):
        assert row[mask].tolist() == expected
        assert mask.tolist() == [True] * written + [False] * (LENGTH - written)


def test_the_prefix_is_computed_once_and_then_token_by_token(awake):
    policy, batch = awake()
    lengths = []
    policy.model.layers[0].backbone.key.register_forward_hook(lambda _, arguments, __: lengths.append(arguments[0].shape[1]))
    policy.generate_response(batch, NEVER)
    assert lengths[0] > LENGTH
    assert lengths[1:] == [1] * (LENGTH - 1), "nothing follows the last one"


def test_a_policy_without_responses_generates_none():
    assert not build("pi05", "tiny_flow").batch_spec().response_generated
    assert not build("pi07_low_level").batch_spec().response_generated
