"""Generation of the response that a policy acts on, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..sequence.token_sequence import concat_blocks, gather_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Batch

    from .flow_policy import FlowPolicy

RESPONSE = "response"


@torch.no_grad()
def generate_response(policy: FlowPolicy, batch: Batch, end: Tensor) -> Batch:
    """Return the batch with the response that the backbone finds most likely, token by token.

    The keys and values of what comes before a token are computed once. They are not kept for acting, which costs one more pass
    over the prefix: acting on a response is then the same code whoever wrote it.

    Arguments are those of `benchbox.registry.contracts.RespondingPolicy.generate_response`.
    """
    end = end.to(batch["response_tokens"].device)
    tokens, mask = torch.zeros_like(batch["response_tokens"]), torch.zeros_like(batch["response_mask"])
    expecting = {**batch, "response_mask": torch.ones_like(mask)}  # so that the words before a response are there
    expecting, present = policy.prepare_batch(expecting, acting=True)
    blocks = policy.blocks(expecting, present)
    blocks = blocks[: next(index for index, block in enumerate(blocks) if block.name == RESPONSE)]
    past = concat_blocks(blocks)
    last = (past.valid * torch.arange(past.valid.shape[1], device=past.valid.device)).amax(dim=1, keepdim=True)
    hidden, cache = policy.model.run_prefix(past)
    hidden = gather_tokens(hidden, last)
    ended = torch.zeros_like(mask[:, 0])
    for position in range(tokens.shape[1]):
        token = policy.token_head(RESPONSE)(policy.model.norm(hidden), predict=True)[:, 0]
        tokens[:, position] = torch.where(ended, tokens[:, position], token)
        mask[:, position] |= ~ended
        ends = ~ended & (token == end[0])
        written = slice(position, position + len(end))
        tokens[ends, written], mask[ends, written] = end[: tokens.shape[1] - position], True
        ended |= ends
        if ended.all() or position == tokens.shape[1] - 1:
            break
        block = policy.model.text(f"{RESPONSE} {position}", tokens[:, [position]], mask[:, [position]], "causal")
        hidden, cache = policy.model.run_prefix(concat_blocks([block]), past, cache)
        blocks.append(block)
        past = concat_blocks(blocks)
    return {**batch, "response_tokens": tokens, "response_mask": mask}
