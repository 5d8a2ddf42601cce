"""Floating-point operations of layers: the matrix products of a forward pass, from module sizes and token counts.

No module is called. Each function follows the `forward` of its module and returns whether the result requires a gradient. Which
factors of a product do depends on the parameters that are trained and on the inputs. Numbers are per sample.
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

    from benchbox.registry.contracts import AttentionKernel, Policy

    from ..families.vision_language import VisionLanguage, VisionLanguageAction
    from ..nn.decoder import DecoderLayer
    from ..nn.siglip import Siglip
    from ..nn.unit import Unit

WeightedLayer = nn.Linear | nn.Conv2d | nn.Embedding


class TokenCount(NamedTuple):
    """A number of tokens, and whether their hidden states require a gradient."""

    number: int
    requires_grad: bool


class FlopTally:
    """The products of a forward pass over a batch, in the order in which they run."""

    def __init__(self, policy: Policy, samples: int) -> None:
        assert isinstance(policy, nn.Module)
        roles = policy.parameter_roles()
        self.products: list[Product] = []
        self._samples = samples
        self._towers: dict[Tensor, str] = {parameter: roles[name].tower for name, parameter in policy.named_parameters()}
        self._unit: int | None = None

    @contextmanager
    def unit(self, unit: Unit) -> Iterator[None]:
        """Assign the products counted inside to one call of the unit, which backward recomputes if it is checkpointed."""
        self._unit = len(self.products) if unit.checkpointing else None
        yield
        self._unit = None

    def count_linear(
        self, layer: WeightedLayer, rows: int, input_requires_grad: bool, *, saved: bool = False, recomputed: bool = False
    ) -> bool:
        """Count a linear layer, a convolution of non-overlapping patches, or an embedding used as an output head.

        Args:
            layer: every row is multiplied by all of its `weight`.
            rows: per sample.
            input_requires_grad: whether the rows require a gradient.
            saved: whether an operation of the unit that is no product, such as a norm or a gate, saves the result for backward.
            recomputed: whether backward computes the result again, because forward does not keep it.

        Returns:
            Whether the output requires a gradient.
        """
        weight = layer.weight
        self._add(weight, rows * weight.numel(), input_requires_grad + weight.requires_grad, fused=recomputed, saved=saved)
        return input_requires_grad or is_trainable(layer)

    def count_lookup_linear(self, table: nn.Embedding, rows: int, input_requires_grad: bool) -> bool:
        """Count a linear layer whose weight is one row of a table; return whether its output requires a gradient."""
        self._add(table.weight, rows * table.embedding_dim, input_requires_grad + table.weight.requires_grad)
        return input_requires_grad or is_trainable(table)

    def count_attention(
        self, output: WeightedLayer, sizes: tuple[int, ...], qkv_require_grad: tuple[bool, bool, bool], *, fused: bool
    ) -> bool:
        """Count the two products of attention: queries with keys, and scores with values.

        Args:
            output: the layer that projects the result: attention is counted in its tower.
            sizes: query heads, queries, keys, head dimension.
            qkv_require_grad: whether query, key and value require a gradient.
            fused: whether the kernel recomputes the scores in backward and computes all gradients together.

        Returns:
            Whether the result requires a gradient.
        """
        query, key, value = qkv_require_grad
        requires_grad, multiply_adds = any(qkv_require_grad), prod(sizes)
        self._add(output.weight, multiply_adds, 2 * requires_grad if fused else query + key, fused=fused)
        self._add(output.weight, multiply_adds, 2 * requires_grad if fused else (query or key) + value)
        return requires_grad

    def _add(self, weight: Tensor, multiply_adds: int, gradients: int, *, fused: bool = False, saved: bool = False) -> None:
        flops = 2 * self._samples * multiply_adds
        tower = self._towers[weight]
        self.products.append(Product(tower=tower, flops=flops, gradients=gradients, fused=fused, unit=self._unit, saved=saved))


def is_trainable(module: nn.Module | None) -> bool:
    """Return whether any parameter of the module requires a gradient."""
    return module is not None and any(parameter.requires_grad for parameter in module.parameters())


def concat_counts(blocks: Mapping[str, TokenCount]) -> TokenCount:
    """Return the token count of the concatenated blocks."""
    return TokenCount(sum(block.number for block in blocks.values()), any(block.requires_grad for block in blocks.values()))


def count_images(tally: FlopTally, model: VisionLanguage, videos: int, frames: int = 1) -> TokenCount:
    """Count `VisionLanguage.images` for a number of videos per sample."""
    requires_grad, projector = count_siglip(tally, model.vision, videos, frames), model.projector
    rows = videos * len(model.vision.position)
    if isinstance(projector, PooledProjector):
        rows, requires_grad = rows // projector.pool**2, requires_grad or is_trainable(projector.norm)
        projector = projector.projection
    return TokenCount(rows, tally.count_linear(projector, rows, requires_grad))


def count_siglip(tally: FlopTally, tower: Siglip, videos: int, frames: int) -> bool:
    """Count `Siglip.forward`, where past frames end at the last layer that attends over time."""
    frames, patches = frames if tower.temporal_layers else 1, len(tower.position)
    patched = tally.count_linear(tower.patches, videos * frames * patches, input_requires_grad=False)
    requires_grad = patched or tower.position.requires_grad
    for index, layer in enumerate(tower.layers):
        assert isinstance(layer, SiglipLayer)
        with tally.unit(layer):
            if frames == 1 or index not in tower.temporal_layers:
                requires_grad = _count_siglip_layer(tally, layer, videos * frames, patches, requires_grad)
            else:
                queries = frames if index < tower.temporal_layers[-1] else 1
                requires_grad = _count_siglip_layer(tally, layer, videos, patches, requires_grad, queries, frames)
                frames = queries
    return requires_grad or is_trainable(tower.norm)


def _count_siglip_layer(
    tally: FlopTally,
    layer: SiglipLayer,
    videos: int,
    patches: int,
    input_requires_grad: bool,
    query_frames: int = 1,
    frames: int = 1,
) -> bool:
    """Count a layer in which the last `query_frames` of a video's `frames` attend over time. An image is one frame."""
    heads, head_dim, fused = layer.heads, layer.query.out_features // layer.heads, layer.kernel != "eager"
    rows = videos * query_frames * patches
    normed = input_requires_grad or is_trainable(layer.attention_norm)
    query = tally.count_linear(layer.query, rows, normed)
    key, value = (tally.count_linear(linear, videos * frames * patches, normed) for linear in (layer.key, layer.value))
    if frames > 1:
        over_time = videos * patches * heads, query_frames, frames, head_dim
        value = tally.count_attention(layer.output, over_time, (query, key, value), fused=fused)
    over_space = videos * query_frames * heads, patches, patches, head_dim
    attended = tally.count_attention(layer.output, over_space, (query, key, value), fused=fused)
    requires_grad = tally.count_linear(layer.output, rows, attended) or input_requires_grad
    hidden = tally.count_linear(layer.up, rows, requires_grad or is_trainable(layer.mlp_norm))
    return tally.count_linear(layer.down, rows, hidden) or requires_grad


def count_language(tally: FlopTally, model: VisionLanguage, tokens: TokenCount) -> TokenCount:
    """Count `VisionLanguage.forward`."""
    for unit in model.layers:
        assert isinstance(unit, BackboneLayer)
        with tally.unit(unit):
            tokens, _ = _count_decoder_layer(tally, unit.backbone, unit.kernel, tokens)
    return tokens


def count_language_action(
    tally: FlopTally, model: VisionLanguageAction, prefix: TokenCount, suffix: TokenCount, condition_requires_grad: bool | None
) -> tuple[TokenCount, TokenCount]:
    """Count `VisionLanguageAction.forward`; `condition_requires_grad` is None for an expert without a condition."""
    for unit in model.layers:
        assert isinstance(unit, LayerPair)
        with tally.unit(unit):
            if unit.prefix_kv_only:
                normed, _ = _norm_requires_grad(tally, unit.backbone.attention_norm, prefix.requires_grad, None)
                key_value = _count_key_value(tally, unit.backbone, prefix.number, normed)
            else:
                prefix, key_value = _count_decoder_layer(tally, unit.backbone, unit.kernel, prefix)
            context = prefix.number, (False, False) if unit.insulated else key_value
            suffix, _ = _count_decoder_layer(tally, unit.expert, unit.kernel, suffix, condition_requires_grad, context)
    requires_grad, _ = _norm_requires_grad(tally, model.expert_norm, suffix.requires_grad, condition_requires_grad)
    return prefix, TokenCount(suffix.number, requires_grad)


def _count_decoder_layer(
    tally: FlopTally,
    layer: DecoderLayer,
    kernel: AttentionKernel,
    tokens: TokenCount,
    condition_requires_grad: bool | None = None,
    context: tuple[int, tuple[bool, bool]] = (0, (False, False)),
) -> tuple[TokenCount, tuple[bool, bool]]:
    """Return the output tokens of the layer, and whether its keys and values require a gradient.

    `context` describes the tokens to which these attend beside themselves: their number, and whether their keys and values
    require a gradient.
    """
    rows, mlp, (context_rows, (context_key, context_value)) = tokens.number, layer.mlp, context
    normed, gate = _norm_requires_grad(tally, layer.attention_norm, tokens.requires_grad, condition_requires_grad)
    query = tally.count_linear(layer.query, rows, normed) or is_trainable(layer.query_norm)
    key, value = _count_key_value(tally, layer, rows, normed)
    sizes = layer.heads, rows, context_rows + rows, layer.head_dim
    fused = kernel == "flex" or (kernel == "sdpa" and layer.softcap is None)
    attended = tally.count_attention(layer.output, sizes, (query, key or context_key, value or context_value), fused=fused)
    branch = tally.count_linear(layer.output, rows, attended) or is_trainable(layer.output_norm)
    requires_grad = tokens.requires_grad or branch or gate
    normed, gate = _norm_requires_grad(tally, layer.mlp_norm, requires_grad, condition_requires_grad)
    hidden = any([tally.count_linear(mlp.gate, rows, normed), tally.count_linear(mlp.up, rows, normed)])
    renormed = layer.down_norm is not None and (hidden or is_trainable(mlp.down) or is_trainable(layer.down_norm))
    branch = tally.count_linear(mlp.down, rows, hidden, saved=gate or renormed)
    return TokenCount(rows, requires_grad or branch or gate or renormed), (key, value)


def _norm_requires_grad(
    tally: FlopTally, norm: nn.Module, input_requires_grad: bool, condition_requires_grad: bool | None
) -> tuple[bool, bool]:
    """Return whether the result of a norm requires a gradient, and whether the gate of an adaptive norm does."""
    if condition_requires_grad is None:
        return input_requires_grad or is_trainable(norm), False
    assert isinstance(norm, AdaRMSNorm)
    modulated = tally.count_linear(norm.modulation, 1, condition_requires_grad)
    return input_requires_grad or modulated, modulated


def _count_key_value(tally: FlopTally, layer: DecoderLayer, rows: int, normed_requires_grad: bool) -> tuple[bool, bool]:
    key = tally.count_linear(layer.key, rows, normed_requires_grad) or is_trainable(layer.key_norm)
    return key, tally.count_linear(layer.value, rows, normed_requires_grad)
