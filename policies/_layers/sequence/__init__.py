"""Token sequences: blocks, attention masks, positions, optional blocks."""
