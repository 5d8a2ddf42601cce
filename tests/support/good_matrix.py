"""The matrix that the tests of `spec` damage."""

GOOD = """\
name: trial
policy: alpha
size: tiny
world_size: 2
axes:
  backend: [zero2, ddp]
  batch: [1, 2]
"""
