"""The layers of a model beside the modules that compute them: what a spec is made of, and what a profiler times."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from motet.core.shapes import unused
from motet.core.spec import Layer

_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LayerModules(NamedTuple):
    """A layer and the modules that hold its parameters, all of them and no others."""

    layer: Layer
    modules: tuple[nn.Module, ...]


def products_layer(kind: str, module: nn.Module, output_width: int, divisor: int = 1) -> LayerModules:
    """A module of which nothing is known: its linear layers and convolutions, each applied once to every row."""
    products = [child.weight for child in module.modules() if isinstance(child, _PRODUCTS)]
    layer = Layer(
        kind,
        weights=sum(weight.numel() for weight in products),
        parameters=sum(p.numel() for p in module.parameters()),
        output_width=output_width,
        activation_width=sum(weight.shape[1] for weight in products),
        divisor=divisor,
        trainable=any_trainable(module),
    )
    return LayerModules(layer, (module,))


def unused_layer(module: nn.Module, output_width: int) -> LayerModules:
    """A module that the model holds and never calls."""
    return LayerModules(unused(sum(p.numel() for p in module.parameters()), output_width), (module,))


def any_trainable(*modules: nn.Module) -> bool:
    return any(p.requires_grad for module in modules for p in module.parameters())


def frozen_to_eval(*parts: nn.Module) -> None:
    """Put those of the parts that have no trainable parameter into eval mode.

    Dropout in a frozen part would be noise that nothing learns to stand, and statistics of a norm would still move. A
    part is an encoder, a projector or the backbone, whole: one of which a share is trained, as with adapters, stays as
    it is, because dropout inside it belongs to the training of that share.
    """
    for part in parts:
        if not any_trainable(part):
            part.eval()
