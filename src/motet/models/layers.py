"""The shape of a module for counting its operations, read off its layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from motet.cost.flops import FlopStage

_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def product_weights(*modules: nn.Module) -> int:
    """Weights that a row meets in the linear layers and convolutions of `modules`, if each is applied once a row."""
    return sum(_weights(module) for module in modules)


def _weights(module: nn.Module) -> int:
    return sum(child.weight.numel() for child in module.modules() if isinstance(child, _PRODUCTS))


def product_stage(*modules: nn.Module, divisor: int = 1, extra_rows: int = 0) -> FlopStage:
    """A stage without attention."""
    return FlopStage(product_weights(*modules), divisor, extra_rows, trained=trains(*modules))


def layers_stage(
    layers: Iterable[nn.Module],
    attention: int,
    divisor: int = 1,
    extra_rows: int = 0,
    causal: bool = False,
    window: int | None = None,
) -> FlopStage:
    """A stage of transformer layers; attention: heads * head_dim of one layer."""
    layers = list(layers)
    weights, width = product_weights(*layers), attention * len(layers)
    return FlopStage(weights, divisor, extra_rows, width, causal, window or 0, trained=trains(*layers))


def trains(*modules: nn.Module) -> bool:
    return any(p.requires_grad for module in modules for p in module.parameters())
