from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy

build_policy("pi05", "tiny", Axes())  # makes `benchbox_policies` importable
