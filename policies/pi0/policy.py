"""pi0: the state is a token of the expert, time is mixed into its actions, and no text is predicted (arXiv:2410.24164).

With the same weights, batch, noise and time, velocity, loss elements, gradients and actions are those of openpi and of LeRobot
to 1e-5 (`reports/parity/parity.md`). These differences are wanted:

- The loss is the mean over the steps before the end of the episode and the dimensions that the data has. That of LeRobot
  includes the steps after the end, which repeat the last action (4% of the loss of the tiny policy with a third of the steps
  padded), that of openpi the padded dimensions too.
- Dimensions whose values are all equal are not normalised. In openpi and LeRobot they become a constant, -1 by quantiles and
  0 by mean and deviation, and a value that differs from the constant later is divided by 1e-6 or 1e-8.
- Deviations, and ranges of quantiles, are increased by 1e-6, as in openpi. LeRobot adds 1e-8 to deviations and nothing to
  ranges: normalised states of the sample dataset differ by up to 2e-5 of their value, and a state in the middle of its range
  is in bin 127 of pi05's prompt here and in openpi, and in bin 128 in LeRobot.
- Shrunk images are averaged, as in openpi. LeRobot interpolates between the nearest pixels and skips the others: at half the
  size single pixels differ by up to 0.4, where black is -1 and white 1.
- While acting, dimensions that the data lacks go from their noise to 0, as the expert saw them in training. openpi and LeRobot
  let it predict them, which LeRobot trains as little as benchbox does. With 4 of 32 dimensions, as in the sample dataset, that
  raised the error of pi05 tiny's normalised actions from 0.240 to 0.418 (600 steps, one seed).
- The task is cleaned as in openpi: underscores and line breaks become spaces. LeRobot's pi0 leaves it as it is. Of one that is
  too long the end is cut, before the line break that ends the prompt; openpi and LeRobot cut the line break too.
- Biases, norms, embeddings and position tables have no weight decay. LeRobot decays all parameters, by the same 0.01.
- After the warm-up, learning rates are those of openpi. LeRobot's cosine begins at step 0 and not at the end of the warm-up: in
  between, its rates are lower by up to 3% of the peak. Below 30000 steps it shortens warm-up and decay in proportion; here
  `optim.warmup_steps` and `optim.total_steps` say what they are.
- `freeze_vision` freezes the projector too, which LeRobot's `freeze_vision_encoder` trains.

Three things are missing:

- Augmentation of images. openpi always trains with it: a random crop of 95% of height and width, which is enlarged again, and a
  rotation by up to 5 degrees, of cameras without "wrist" in their names; random brightness, contrast and saturation of all.
  In LeRobot it is an option of the dataset, which is off by default.
- Relative actions. openpi's data transforms and LeRobot's `use_relative_actions`, which is off by default, subtract the current
  state from the actions of a chunk, but for dimensions such as the gripper. Here actions are learned as the dataset has them.
- Real-time chunking. LeRobot's `rtc_config`, which is off by default, leads a chunk to what is left of the one before it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from .._layers.cost.flops import TokenCount
from .._layers.families.flow import embed_time
from .._layers.families.flow_policy import FlowConfig, FlowPolicy, unpadded_block
from .._layers.nn.precision import Linear
from .._layers.presets import builder
from .._layers.sequence.token_sequence import concat_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, BatchSpec

    from .._layers.cost.flops import FlopTally
    from .._layers.sequence.token_sequence import Block, TokenSequence


class Pi0(FlowPolicy):
    """Images and prompt attend to one another, the state token to them, and the actions to everything."""

    predicted: ClassVar[tuple[str, ...]] = ()
    reads_state: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False

    def __init__(self, config: FlowConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        width = config.model.expert.width
        self.state_in = Linear(config.state_dim, width)
        self.time_in = Linear(2 * width, width)
        self.time_out = Linear(width, width)

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:  # noqa: ARG002
        return [self.model.images("images", batch["images"], batch["image_mask"]), self.text("prompt", batch, "continue")]

    def batch_spec(self) -> BatchSpec:
        return replace(super().batch_spec(), state_normalisation="mean_std", action_normalisation="mean_std")

    def suffix(self, batch: Batch, x_t: Tensor, time: Tensor) -> tuple[TokenSequence, None]:
        state = self.state_in(self.normalised_states(batch)[:, -1:])
        actions = self.action_in(x_t)
        times = embed_time(time, actions.shape[-1])[:, None].expand_as(actions).to(actions.dtype)
        actions = self.time_out(F.silu(self.time_in(torch.cat((actions, times), dim=-1))))
        return concat_blocks([unpadded_block("state", state), unpadded_block("actions", actions)]), None

    def count_suffix(self, tally: FlopTally) -> tuple[TokenCount, None]:
        horizon = self.config.horizon
        state = tally.count_linear(self.state_in, 1, input_requires_grad=False)
        actions = tally.count_linear(self.action_in, horizon, input_requires_grad=False)
        actions = tally.count_linear(self.time_out, horizon, tally.count_linear(self.time_in, horizon, actions))
        return TokenCount(1 + horizon, actions or state), None


build = builder(Pi0, FlowConfig)
