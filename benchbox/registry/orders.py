"""Orders in which samples are drawn (`benchbox.data`), by name."""

from __future__ import annotations

ORDERS = ("frame_shuffle", "episode_shuffle", "sequential")
