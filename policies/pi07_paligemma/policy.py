"""pi07, low level, on PaliGemma: the sizes of pi05, and the context of pi07_low_level in other words.

As OpenTau's `pi07_paligemma`. What pi06 says about dropout and losses holds here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .._layers.families.context_policy import ContextConfig, ContextPolicy
from .._layers.presets import builder

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch

    from .._layers.sequence.token_sequence import Attention, Block


class Pi07PaliGemma(ContextPolicy):
    """Videos, prompt and states attend to one another. Each block of context after them does, and to all before it.

    "Action: " and FAST tokens are causal.
    """

    announced: ClassVar[dict[str, tuple[str, ...]]] = {
        "response_start": ("response",),
        "metadata_start": ("metadata",),
        "metadata": ("metadata",),
        "subgoal_start": ("subgoal",),
        "subgoal": ("subgoal",),
    }
    cue_texts: ClassVar[dict[str, str]] = {
        "state": "State: ",
        "response_start": ", ",
        "metadata_start": ", ",
        "metadata": "Metadata: ",
        "subgoal_start": ", ",
        "subgoal": "Subgoal: ",
        "state_end": ":\n",
    }
    response_template: ClassVar[str] = "Subtask: {text}"

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        def after(name: str) -> Attention:
            """Return the attention of a cue that belongs to the optional block before it.

            Without that block it begins a group of its own: it would join another one, and samples without the block would be
            masked otherwise than beside samples that have it.
            """
            return "continue" if name in present else "bidirectional"

        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "continue"),
            *self.cue("state", batch, present, "continue"),
            self.state_block(batch, "continue"),
            *self.cue("response_start", batch, present, "continue"),
            *([self.text("response", batch, "bidirectional")] if "response" in present else []),
            *self.cue("metadata_start", batch, present, after("response")),
            *self.cue("metadata", batch, present, "bidirectional"),
            *([self.text("metadata", batch, "continue")] if "metadata" in present else []),
            *self.cue("subgoal_start", batch, present, after("metadata")),
            *self.cue("subgoal", batch, present, "bidirectional"),
            *([self.subgoal_block(batch, "continue")] if "subgoal" in present else []),
            *self.cue("state_end", batch, present, after("subgoal")),
        ]


build = builder(Pi07PaliGemma, ContextConfig)
