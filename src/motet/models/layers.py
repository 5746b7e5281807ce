"""The layers of a model with the modules that compute them. Specs are made of them, and profilers time them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from motet.core.shapes import unused
from motet.core.spec import Attention, Layer
from motet.models.experts import RoutedExperts
from motet.models.named_weights import is_lora

_TRAINED_ELSEWHERE = "is_trained_elsewhere"
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)


class LayerModules(NamedTuple):
    """A layer and the modules that hold exactly its parameters.

    timed: what a profile times as the layer, where that is not `modules`: a module that computes layers beside it, too,
           of which the others have ().
    """

    layer: Layer
    modules: tuple[nn.Module, ...]
    timed: tuple[nn.Module, ...] | None = None

    def timed_as(self, *modules: nn.Module) -> LayerModules:
        """The same layer, timed by these modules; by none where another layer is timed with it."""
        return self._replace(timed=modules)


def products_layer(
    kind: str, module: nn.Module, output_width: int, divisor: int = 1, item_rows: int = 0
) -> LayerModules:
    """The layer of an unknown module: a chain of its linear layers and convolutions, each applied once to every row."""
    products = [child for child in module.modules() if isinstance(child, _PRODUCTS)]
    layer = Layer(
        kind,
        weights=sum(product.weight.numel() for product in products),
        parameters=sum(p.numel() for p in module.parameters()),
        output_width=output_width,
        activation_width=sum(map(_reads, products)),
        divisor=divisor,
        trainable=any_trainable(module),
        item_rows=item_rows,
        inner_weights=sum(product.weight.numel() for product in products[1:]),
    )
    return LayerModules(layer, (module,))


def as_it_learns(each: LayerModules) -> LayerModules:
    """The layer with its adapters, and with what of it is frozen where the rest learns.

    An adapter keeps its rows of low rank for backward, and what it has dropped out of its input, with a mask.
    """
    layer, named = each.layer, [named for module in each.modules for named in module.named_parameters()]
    parameters, added = {id(p): p for _, p in named}, sum(p.numel() for name, p in named if is_lora(name))
    adapted = [child for module in each.modules for child in module.modules() if hasattr(child, "lora_A")]
    layer = replace(layer, weights=layer.weights + added, parameters=layer.parameters + added)
    frozen = {key for key, p in parameters.items() if not p.requires_grad}
    if frozen and layer.trainable:
        weights = sum(count for key, count in _products(each.modules).items() if key in frozen)
        of_experts = (p for routed in _routed(each.modules) for p in routed.experts.parameters())
        layer = replace(
            _as_kept(layer, each.modules),
            frozen_weights=min(layer.weights, weights),
            frozen_parameters=min(layer.parameters, sum(parameters[key].numel() for key in frozen)),
            frozen_expert_weights=sum(p[0].numel() for p in of_experts if id(p) in frozen),
        )
    kept = sum(child.lora_A.out_features + _kept_dropout(child) for child in adapted)
    return each._replace(layer=replace(layer, activation_width=layer.activation_width + kept))


def _kept_dropout(adapted: nn.Module) -> int:
    """Elements of a row that an adapter keeps of its input with dropout: what is left, and a mask of a byte each."""
    width: int = adapted.lora_A.in_features
    return width + -(-width // 2) if adapted.lora_dropout else 0


def _as_kept(layer: Layer, modules: Sequence[nn.Module]) -> Layer:
    """The layer without what is kept for gradients of weights that are frozen.

    Products of one module that read as many elements read one row: queries, keys and values, or both factors of an MLP.
    """
    every = [child for module in modules for child in module.modules()]
    parents = [each for each in every if not isinstance(each, _PRODUCTS)]  # Adapters stand in products.
    owned = [(id(parent), child) for parent in parents for child in parent.children()]
    owned += [(id(modules), module) for module in modules]
    products = [(owner, child) for owner, child in owned if isinstance(child, _PRODUCTS)]
    read = {(owner, _reads(child)) for owner, child in products}
    learning = {(owner, _reads(child)) for owner, child in products if _keeps_input(child)}
    of_experts = _of_experts(modules)
    of_rows, norms = layer.weight_width - layer.divided_weight_width, _share_of_norms(every)
    # What is left is of norms: of whole rows, and of heads.
    of_norms = max(of_rows - 2 * layer.output_width, 0)
    of_heads = max(layer.divided_weight_width - _inner(read, layer) - sum(of_experts.values()), 0)
    whole = min(sum(width for _, width in learning) - _inner(learning, layer) + round(norms * of_norms), of_rows)
    divided = _inner(learning, layer) + round(norms * of_heads)
    divided += sum(width for weight, width in of_experts.items() if weight.requires_grad)
    divided = min(divided, layer.divided_weight_width)
    gone, gone_divided = layer.weight_width - whole - divided, layer.divided_weight_width - divided
    return replace(
        layer,
        activation_width=layer.activation_width - gone,
        divided_width=layer.divided_width - gone_divided,
        weight_width=whole + divided,
        divided_weight_width=divided,
    )


def _reads(product: nn.Module) -> int:
    """Elements of a row that a product reads."""
    is_in_first = isinstance(product, Conv1D) or getattr(product, "is_transposed", False)
    width: int = product.weight.shape[0 if is_in_first else 1]
    return width


def _inner(read: Iterable[tuple[int, int]], layer: Layer) -> int:
    """Of the elements that products read, those of rows inside of the layer's branches. read: (owner, elements)."""
    return sum(width for _, width in read if width != layer.output_width)


def _of_experts(modules: Iterable[nn.Module]) -> dict[nn.Parameter, int]:
    """By the matrices of experts, the elements that those which compute a row read of it together."""
    return {
        weight: routed.experts_per_token * weight.shape[-1]
        for routed in _routed(modules)
        for weight in routed.experts.parameters()
    }


def _keeps_input(product: nn.Module) -> bool:
    """Whether a product, or an adapter, keeps the row that it reads; of what it drops out it keeps a copy instead."""
    return product.weight.requires_grad or (hasattr(product, "lora_A") and not product.lora_dropout)


def _share_of_norms(modules: Iterable[nn.Module]) -> float:
    """Of what norms keep for gradients of their weights, the share whose weights learn."""
    weights = [getattr(module, "weight", None) for module in modules if not isinstance(module, nn.LayerNorm)]
    norms = [weight for weight in weights if isinstance(weight, nn.Parameter) and weight.ndim == 1]
    learning = sum(weight.numel() for weight in norms if weight.requires_grad)
    return learning / max(sum(weight.numel() for weight in norms), 1)


def _routed(modules: Iterable[nn.Module]) -> list[RoutedExperts]:
    return [child for module in modules for child in module.modules() if isinstance(child, RoutedExperts)]


def _products(modules: Sequence[nn.Module]) -> dict[int, int]:
    """By the id of a matrix, how many of its entries multiply a row: of experts', those of as many as compute one."""
    inner = [child for module in modules for child in module.modules()]
    products = {id(child.weight): child.weight.numel() for child in inner if isinstance(child, _PRODUCTS)}
    for routed in _routed(modules):
        products[id(routed.gate.weight)] = routed.gate.weight.numel()
        for every in routed.experts.parameters():
            products[id(every)] = every[0].numel() * routed.experts_per_token
    return products


def layer_of(
    kind: str,
    modules: Iterable[nn.Module | None],
    kept: int,
    output: int,
    attention: Attention | None = None,
    **rows: int,
) -> LayerModules:
    """A layer of a block that began before it: linear layers, convolutions, norms and tables of numbers.

    modules: None: is not there. kept: elements of a row that forward keeps for backward. output: of an output row.
    rows: divisor, multiple, extra_rows or item_rows of the layer; continues = False: it begins a block with its
          attention, or stands before or behind the blocks.
    """
    there = tuple(module for module in modules if module is not None)
    products = [each.weight for module in there for each in module.modules() if isinstance(each, _PRODUCTS)]
    layer = Layer(
        kind,
        sum(weight.numel() for weight in products),
        sum(p.numel() for module in there for p in module.parameters()),
        output,
        kept,
        attention,
        continues=True,
        trainable=any_trainable(*there),
    )
    return LayerModules(replace(layer, **rows), there)


def unused_layer(module: nn.Module, output_width: int) -> LayerModules:
    """The layer of a module that the model holds and never calls."""
    return LayerModules(unused(sum(p.numel() for p in module.parameters()), output_width), (module,))


def any_trainable(*modules: nn.Module) -> bool:
    """Whether any of the modules has a trainable parameter."""
    return any(p.requires_grad for module in modules for p in module.parameters())


def as_with_rows(x: Tensor, layers: Callable[[], Iterable[LayerModules]], blocks: Sequence[nn.Module]) -> Tensor:
    """x of a rank without rows, before blocks: it requires a gradient if rows on other ranks do there.

    Such a rank runs the same blocks backward as others: FSDP gathers frozen ones for it, too.
    layers: of the module, in execution order.
    """
    # A block that learns lets its input require one itself.
    if not torch.is_grad_enabled() or x.requires_grad or not blocks or any_trainable(blocks[0]):
        return x
    return x.detach().requires_grad_(_learns_before(layers(), blocks[0]))


def _learns_before(layers: Iterable[LayerModules], block: nn.Module) -> bool:
    """Whether anything learns in the layers before those of a block."""
    inside = {id(parameter) for parameter in block.parameters()}
    for each in layers:
        own = [parameter for module in each.modules for parameter in module.parameters()]
        if any(id(parameter) in inside for parameter in own):
            return False
        if any(parameter.requires_grad for parameter in own):
            return True
    return False


def frozen_to_eval(*parts: nn.Module) -> None:
    """Put each part without trainable parameters into eval mode. A part is a whole encoder, projector or backbone.

    In train mode a frozen part would add dropout noise, and statistics of its norms would still change. A part with
    some trainable parameters (adapters) keeps its mode: dropout inside it belongs to their training. They may be on
    other ranks (`part.keep_spans`).
    """
    for part in parts:
        if not any_trainable(part) and not getattr(part, _TRAINED_ELSEWHERE, False):
            part.eval()


def weighted_callbacks(*callbacks: object) -> list[nn.Module]:
    """The callbacks that hold weights, to be frozen and put into eval mode as a part is."""
    return [each for each in callbacks if isinstance(each, nn.Module) and next(each.parameters(), None) is not None]


def note_trained(*parts: nn.Module) -> None:
    """Note of each part whether it has trainable parameters, before some of them are taken from it."""
    for part in parts:
        setattr(part, _TRAINED_ELSEWHERE, any_trainable(part))
