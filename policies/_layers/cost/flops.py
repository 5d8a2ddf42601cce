"""What layers cost: the matrix products of a forward pass, from the sizes of modules and the numbers of tokens.

Nothing is run. Each function goes through a module as its `forward` does and answers, as that would, whether the result needs a
gradient: which factors of a product need one depends on what is trained below it. Numbers are those of one sample.
"""

from __future__ import annotations

from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from benchbox.theory.flops import Product

from ..nn.norms import AdaRMSNorm
from ..nn.projector import PooledProjector
from ..nn.siglip import SiglipLayer
from ..nn.units import BackboneLayer, LayerPair

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Kernel, Policy

    from ..families.vision_language import VisionLanguage, VisionLanguageAction
    from ..nn.decoder import DecoderLayer
    from ..nn.siglip import Siglip
    from ..nn.unit import Unit

WeightedLayer = nn.Linear | nn.Conv2d | nn.Embedding


class TokenCount(NamedTuple):
    """So many tokens, and whether they need a gradient."""

    number: int
    below: bool


class FlopTally:
    """The products of a forward pass over so many samples, in the order in which they run."""

    def __init__(self, policy: Policy, samples: int) -> None:
        assert isinstance(policy, nn.Module)
        roles = policy.parameter_roles()
        self.products: list[Product] = []
        self._samples = samples
        self._towers: dict[Tensor, str] = {parameter: roles[name].tower for name, parameter in policy.named_parameters()}
        self._unit: int | None = None

    @contextmanager
    def unit(self, unit: Unit) -> Iterator[None]:
        """What is counted inside is computed in one call of the unit, and again in backward where it is checkpointed."""
        self._unit = len(self.products) if unit.checkpointing else None
        yield
        self._unit = None

    def through(self, layer: WeightedLayer, rows: int, below: bool, *, kept: bool = False) -> bool:
        """Rows through a linear layer, a convolution whose patches do not overlap, or a table that scores them.

        Args:
            layer: every row meets all of its `weight`.
            rows: in one sample.
            below: whether the rows need a gradient.
            kept: whether what follows in the unit, but is no product, needs the result in backward: a norm, a gate.
        """
        weight = layer.weight
        self._add(weight, rows * weight.numel(), below + weight.requires_grad, kept=kept)
        return below or is_trainable(layer)

    def attend(self, output: WeightedLayer, sizes: tuple[int, ...], needing: tuple[bool, bool, bool], *, fused: bool) -> bool:
        """Queries with keys, and what comes of it with values.

        Args:
            output: the layer that the answer goes to: attention is counted in its tower.
            sizes: heads that ask, queries, keys, width of a head.
            needing: whether query, key and value need a gradient.
            fused: by a kernel that forms the scores again in backward, and all gradients together.
        """
        query, key, value = needing
        needed, multiply_adds = any(needing), prod(sizes)
        self._add(output.weight, multiply_adds, 2 * needed if fused else query + key, fused=fused)
        self._add(output.weight, multiply_adds, 2 * needed if fused else (query or key) + value)
        return needed

    def _add(self, weight: Tensor, multiply_adds: int, needed: int, *, fused: bool = False, kept: bool = False) -> None:
        flops = 2 * self._samples * multiply_adds
        tower = self._towers[weight]
        self.products.append(Product(tower=tower, flops=flops, needed=needed, fused=fused, unit=self._unit, kept=kept))


def is_trainable(module: nn.Module | None) -> bool:
    """Whether any parameter of it does."""
    return module is not None and any(parameter.requires_grad for parameter in module.parameters())


def concat_counts(blocks: Mapping[str, TokenCount]) -> TokenCount:
    """Blocks end to end."""
    return TokenCount(sum(block.number for block in blocks.values()), any(block.below for block in blocks.values()))


def count_images(tally: FlopTally, model: VisionLanguage, videos: int, frames: int = 1) -> TokenCount:
    """`VisionLanguage.images`, of so many videos in a sample."""
    below, projector = count_siglip(tally, model.vision, videos, frames), model.projector
    rows = videos * len(model.vision.position)
    if isinstance(projector, PooledProjector):
        rows, below = rows // projector.pool**2, below or is_trainable(projector.norm)
        projector = projector.projection
    return TokenCount(rows, tally.through(projector, rows, below))


def count_siglip(tally: FlopTally, tower: Siglip, videos: int, frames: int) -> bool:
    """`Siglip.forward`: past frames go as far as the last layer that attends over time."""
    seen, patches = frames if tower.temporal else 1, len(tower.position)
    below = tally.through(tower.patches, videos * seen * patches, below=False) or tower.position.requires_grad
    for index, layer in enumerate(tower.layers):
        assert isinstance(layer, SiglipLayer)
        with tally.unit(layer):
            if seen == 1 or index not in tower.temporal:
                below = _siglip_layer(tally, layer, videos * seen, patches, below)
            else:
                asking = seen if index < tower.temporal[-1] else 1
                below = _siglip_layer(tally, layer, videos, patches, below, asking, seen)
                seen = asking
    return below or is_trainable(tower.norm)


def _siglip_layer(
    tally: FlopTally, layer: SiglipLayer, videos: int, patches: int, below: bool, asking: int = 1, seen: int = 1
) -> bool:
    """Of so many frames `seen` of a video the last `asking` look back, and go on. An image is a video of one."""
    heads, width, fused = layer.heads, layer.query.out_features // layer.heads, layer.kernel != "eager"
    rows = videos * asking * patches
    normed = below or is_trainable(layer.attention_norm)
    query = tally.through(layer.query, rows, normed)
    key, value = (tally.through(part, videos * seen * patches, normed) for part in (layer.key, layer.value))
    if seen > 1:
        over_time = videos * patches * heads, asking, seen, width
        value = tally.attend(layer.output, over_time, (query, key, value), fused=fused)
    over_space = videos * asking * heads, patches, patches, width
    attended = tally.attend(layer.output, over_space, (query, key, value), fused=fused)
    below = tally.through(layer.output, rows, attended) or below
    hidden = tally.through(layer.up, rows, below or is_trainable(layer.mlp_norm))
    return tally.through(layer.down, rows, hidden) or below


def count_language(tally: FlopTally, model: VisionLanguage, stream: TokenCount) -> TokenCount:
    """`VisionLanguage.forward`."""
    for unit in model.layers:
        assert isinstance(unit, BackboneLayer)
        with tally.unit(unit):
            stream, _ = _layer(tally, unit.backbone, unit.kernel, stream)
    return stream


def count_language_action(
    tally: FlopTally, model: VisionLanguageAction, prefix: TokenCount, suffix: TokenCount, condition: bool | None
) -> tuple[TokenCount, TokenCount]:
    """`VisionLanguageAction.forward`; `condition` is whether the expert's needs a gradient, None where it has none."""
    for unit in model.layers:
        assert isinstance(unit, LayerPair)
        with tally.unit(unit):
            if unit.prefix_kv_only:
                normed, _ = _norm(tally, unit.backbone.attention_norm, prefix.below, None)
                keys = _keys(tally, unit.backbone, prefix.number, normed)
            else:
                prefix, keys = _layer(tally, unit.backbone, unit.kernel, prefix)
            seen = prefix.number, (False, False) if unit.insulated else keys
            suffix, _ = _layer(tally, unit.expert, unit.kernel, suffix, condition, seen)
    below, _ = _norm(tally, model.expert_norm, suffix.below, condition)
    return prefix, TokenCount(suffix.number, below)


def _layer(
    tally: FlopTally,
    layer: DecoderLayer,
    kernel: Kernel,
    x: TokenCount,
    condition: bool | None = None,
    seen: tuple[int, tuple[bool, bool]] = (0, (False, False)),
) -> tuple[TokenCount, tuple[bool, bool]]:
    """A stream one layer on, and whether its keys and values need a gradient.

    It sees itself and so many tokens that were `seen` before, of whose keys and values the same is told.
    """
    rows, mlp, (others, (other_key, other_value)) = x.number, layer.mlp, seen
    normed, gate = _norm(tally, layer.attention_norm, x.below, condition)
    query = tally.through(layer.query, rows, normed) or is_trainable(layer.query_norm)
    key, value = _keys(tally, layer, rows, normed)
    sizes = layer.heads, rows, others + rows, layer.head_dim
    fused = kernel == "flex" or (kernel == "sdpa" and layer.softcap is None)
    attended = tally.attend(layer.output, sizes, (query, key or other_key, value or other_value), fused=fused)
    branch = tally.through(layer.output, rows, attended) or is_trainable(layer.output_norm)
    below = x.below or branch or gate
    normed, gate = _norm(tally, layer.mlp_norm, below, condition)
    hidden = any([tally.through(mlp.gate, rows, normed), tally.through(mlp.up, rows, normed)])
    renormed = layer.down_norm is not None and (hidden or is_trainable(mlp.down) or is_trainable(layer.down_norm))
    branch = tally.through(mlp.down, rows, hidden, kept=gate or renormed)
    return TokenCount(rows, below or branch or gate or renormed), (key, value)


def _norm(tally: FlopTally, norm: nn.Module, below: bool, condition: bool | None) -> tuple[bool, bool]:
    """Whether what is normed needs a gradient, and whether an adaptive norm's gate does."""
    if condition is None:
        return below or is_trainable(norm), False
    assert isinstance(norm, AdaRMSNorm)
    modulated = tally.through(norm.modulation, 1, condition)
    return below or modulated, modulated


def _keys(tally: FlopTally, layer: DecoderLayer, rows: int, normed: bool) -> tuple[bool, bool]:
    key = tally.through(layer.key, rows, normed) or is_trainable(layer.key_norm)
    return key, tally.through(layer.value, rows, normed)
