"""Hooks into torch: optimizer steps, forward passes, dispatched operations, collectives, matrix products, patched calls."""
