"""pi06: pi05 on Gemma 3, with causal text and fewer denoising steps.

As OpenTau, except for what follows, which also holds for its other policies. The figures are relative changes at a tiny size
with random weights (`tests/parity/test_opentau.py`).

- The positions of global layers are divided by 8, as in transformers: Gemma 3 was trained so. OpenTau does not divide them,
  which changes the velocity by 1.1%.
- States are normalised by quantiles before they are binned. OpenTau normalises by mean and deviation, with which 32% of a
  normally distributed state lies outside the bins instead of 2%.
- A text to learn begins with its first word, and one that a sample lacks is masked. OpenTau writes the token `<bos>` before
  every text, although no text begins there (0.4% of the velocity), and `<eos>` also after a missing one.
- There is no dropout. OpenTau drops a tenth of the outputs of attention and MLP in training, which changes the velocity by 6%.
  A policy here draws no random numbers, so that a step is a function of parameters and batch.
- The first FAST token is predicted by the last token before it. In OpenTau this is padding where the response is shorter than
  its field, which changes the cross-entropy of that token by 7%.
- Losses are means of the means of samples, see `combine_losses`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from .._layers.families.flow_policy import FlowConfig, FlowPolicy
from .._layers.presets import builder

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec

    from .._layers.sequence.token_sequence import Block


class Pi06(FlowPolicy):
    """Images attend to one another; prompt, which contains the state, response, "Actions:" and FAST tokens are causal.

    The expert attends to all but the FAST tokens. No layer has a sliding window, also as in OpenTau: the images of four cameras
    would fill that of Gemma 3, and they attend to one another.
    """

    optional: ClassVar[dict[str, str]] = {"response": "response_mask"}
    fast_cue: ClassVar[str] = ""

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "causal"),
            *([self.text("response", batch, "causal")] if "response" in present else []),
            *self.cue("action", batch, present),
        ]

    def batch_spec(self) -> BatchSpec:
        return replace(
            super().batch_spec(),
            state_in_prompt=True,
            lowest_bin=0,
            prompt_template="Task: {task}<eos>State: {state}<eos>" + "Response:" * bool(self.config.response_tokens),
            cues={"action": "Actions:"},
        )


build = builder(Pi06, FlowConfig)
