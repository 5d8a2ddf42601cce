"""Times of training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MODE_SCALE = 1.29


def waver_time(uniform: Tensor, shift: float) -> Tensor:
    """Map uniform numbers u to times in (0, 1] in float32, as Waver (arXiv:2508.15761) and Cosmos 3 sample those of videos.

    t = 1 - u - s (cos^2(pi/2 u) - 1 + u) with s = 1.29 falls in u and is most dense in the middle (mode sampling of
    arXiv:2403.03206, section 3.1). The shift moves it towards noise: shift * t / (1 + (shift - 1) * t). With a shift of 5 half
    of the times are above 5/6.
    """
    u = uniform.float()
    t = 1 - u - MODE_SCALE * ((math.pi / 2 * u).cos().square() - 1 + u)
    return shift * t / (1 + (shift - 1) * t)
