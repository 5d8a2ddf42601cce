"""Trackers: where the rows of `metrics.jsonl` go besides that file."""
