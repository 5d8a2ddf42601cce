"""Compilation of a policy by torch.compile, layer by layer or as a whole.

Functions are compiled in place of modules, which keep their classes and names. Hooks by which backends gather and reduce a
whole layer stay outside the graphs; those on modules inside of one, as of ZeRO-3, break them. Nothing is compiled before the
first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from benchbox.adapters.units import outermost_layers
from benchbox.errors import UnsupportedError

if TYPE_CHECKING:
    from benchbox.registry.contracts import CompileMode, Policy

# Torch compiles 8 variants of a code object by default, and runs further ones uncompiled. Modules of a class share their code,
# as all linear layers do: each of their shapes, dtypes and settings is a variant, 11 of them in pi05 tiny under ZeRO-3. A limit
# remains, because DeepSpeed's hooks are a variant for every module, and a higher one only makes them compile for longer.
_RECOMPILE_LIMIT = 16


def compile_policy(policy: Policy, mode: CompileMode) -> None:
    """Let torch.compile compile what `mode` says, at its first call. To be called before a backend wraps the policy.

    Raises:
        UnsupportedError: the policy has no layers that could be compiled one by one.
    """
    assert isinstance(policy, nn.Module)
    if mode != "off":
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    if mode == "model":
        _compile_method(policy, "forward")
    elif mode == "blocks":
        layers = outermost_layers(policy, policy.layer_units())
        if not layers:
            raise UnsupportedError(f"no layers of {type(policy).__name__} repeat: write compile: model")
        for layer in layers:
            # What decides whether a layer is recomputed stays outside its graph, so that a recomputation can be seen.
            inner = getattr(layer, "_checkpoint_wrapped_module", layer)
            _compile_method(inner, "block" if hasattr(inner, "block") else "forward")


def _compile_method(module: nn.Module, name: str) -> None:
    setattr(module, name, torch.compile(getattr(module, name)))
