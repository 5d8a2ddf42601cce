"""Micro-batches of a rank: worker processes, packing, prefetching."""
