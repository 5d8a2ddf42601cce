"""Differences from OpenTau that are kept: their effects, which the docstrings of the policies quote."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from benchbox.data.text.prompt import BOS
from tests.parity.opentau import (
    Part,
    Sequence,
    layers_of,
    sequence_of,
    text,
)
from tests.reference import opentau_losses as losses

if TYPE_CHECKING:
    from torch import Tensor


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
