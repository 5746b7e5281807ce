"""The part of a model that one rank holds under a Plan: spans of blocks, with what stands before and behind them.

A block's parameters are those of its layers (`Module.blocks`, `layers()`), so that the first block brings what stands
before the blocks, and the last one what stands behind them. The rest of the module stays, without parameters: its code
decides names, and the arguments of layers. So every parameter keeps the name that it has in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from torch import nn

from motet.core.spec import Module
from motet.core.workload import BACKBONE
from motet.models.backbone import Backbone
from motet.models.generator import GeneratorModule
from motet.models.layers import note_trained
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule

HeldSpans = Mapping[str, tuple[int, int]]
"""Module -> (first, stop) of its blocks."""


def names_of_spans(mllm: MLLM, spans: HeldSpans) -> set[str]:
    """The names in the whole model of the parameters that spans of blocks hold; of tied ones, the first name."""
    held = {id(parameter) for name, span in spans.items() for parameter in _parameters(_module(mllm, name), *span)}
    return {name for name, parameter in mllm.named_parameters() if id(parameter) in held}


def keep_spans(mllm: MLLM, *stages: HeldSpans) -> None:
    """Take from a model, in place, all parameters but those of `stages`, and the modules that no stage names.

    A parameter that is tied stays where any of the blocks that use it stays.
    """
    for name in [*mllm.encoders, BACKBONE, *mllm.generators]:
        spans, module = [spans[name] for spans in stages if name in spans], _module(mllm, name)
        note_trained(*_learning_parts(module))
        _empty(module, spans)
        if not spans:
            _remove(mllm, name)


def _module(mllm: MLLM, name: str) -> ModalityModule | Backbone | GeneratorModule:
    return mllm.backbone if name == BACKBONE else mllm.measured[name]


def _learning_parts(module: ModalityModule | Backbone | GeneratorModule) -> list[nn.Module]:
    """The parts that learn or do not, each as a whole."""
    if isinstance(module, Backbone):
        return [module.causal_lm]
    is_generator = isinstance(module, GeneratorModule)
    return [module.generator, module.entrance] if is_generator else [module.encoder, module.projector]


def _remove(mllm: MLLM, name: str) -> None:
    if name == BACKBONE:
        mllm.backbone = None
    else:
        del (mllm.generators if name in mllm.generators else mllm.encoders)[name]


def _parameters(module: ModalityModule | Backbone | GeneratorModule, first: int, stop: int) -> chain[nn.Parameter]:
    """The parameters of the blocks first ... stop - 1."""
    layers = module.layers()
    indexes = Module.of("", (each.layer for each in layers)).block_layers(first, stop)
    return chain.from_iterable(part.parameters() for index in indexes for part in layers[index].modules)


def _empty(module: ModalityModule | Backbone | GeneratorModule, spans: Sequence[tuple[int, int]]) -> None:
    held = {id(parameter) for span in spans for parameter in _parameters(module, *span)}
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is not None and id(parameter) not in held:
                child._parameters[key] = None
