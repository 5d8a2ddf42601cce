"""Building blocks that policies share: towers, attention, masks, flow matching, discrete actions."""
