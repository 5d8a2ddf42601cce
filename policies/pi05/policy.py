"""pi05: state as text; FAST tokens train the backbone, flow matching trains the expert (arXiv:2504.16054).

The presets `full_flow` and `tiny_flow` are the policy that openpi and LeRobot train: without FAST tokens and response, with
"Action: " at the end of the prompt, where the expert reads it, and a backbone that the flow loss trains. With the same weights,
batch, noise and time, their velocity, loss elements, gradients and actions are those of openpi and of LeRobot to 1e-5
(`reports/parity/parity.md`). What differs on purpose is listed in `pi0`: the loss skips padding (8% of the loss of the tiny
policy with a third of the steps padded), dimensions whose values are all equal are not normalised (in the prompt they have the
number of the raw value, where openpi and LeRobot have 0), shrunk images are averaged, dimensions that the data lacks are not
predicted while acting, and ranges, weight decay, learning rates and `freeze_vision` are as there. Of a prompt that is too long
the task is cut; openpi and LeRobot cut the end of the text, and with it the state. A state of more than `state_dim` dimensions
is refused; as text, openpi and LeRobot take it. As in `pi0`, the augmentation of images that openpi trains with, the relative
actions that both offer and LeRobot's real-time chunking are missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from .._layers.families.flow_policy import FlowConfig, FlowPolicy
from .._layers.presets import builder

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec

    from .._layers.sequence.token_sequence import Block


class Pi05(FlowPolicy):
    """Images and prompt, which contains the state, attend to one another; the rest is causal, as in OpenTau.

    The rest is "Response: ", the response, "Action: " and FAST tokens; the expert attends to none of the last two. State bins
    are those of openpi, also below the first. What pi06 says about quantiles, `<bos>`, dropout and losses holds here too.
    """

    optional: ClassVar[dict[str, str]] = {"response": "response_mask"}
    announced: ClassVar[dict[str, tuple[str, ...]]] = {"response": ("response",)}

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "continue"),
            *([*self.cue("response", batch, present), self.text("response", batch, "causal")] if "response" in present else []),
        ]

    def batch_spec(self) -> BatchSpec:
        spec = super().batch_spec()
        return replace(
            spec,
            cues={"response": "Response: ", **spec.cues} if self.config.response_tokens else spec.cues,
            response_template="{text}<eos>;\n",
            state_in_prompt=True,
            prompt_end="" if self.config.fast_tokens else "Action: ",
            state_normalisation="quantile",
            action_normalisation="quantile",
        )


build = builder(Pi05, FlowConfig)
