"""A static site over many runs: an index, and for each matrix the trends of its cells over commits."""
