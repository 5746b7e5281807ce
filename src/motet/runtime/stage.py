"""The interface that the runtime expects of a model: modules, whether they are trainable, and stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from motet.ahead import finding
from motet.core.arrays import Int64Array
from motet.core.workload import BACKBONE
from motet.dispatch.batch import PackedSequences, RankBatch
from motet.runtime.tensors import Root


class ExecutableStage(Protocol):
    """One stage of a Program, with its weights; `StagePasses` calls it for each microbatch."""

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        """The output for a microbatch; a stage that takes a loss returns its sum, a scalar.

        inputs: module -> its output, for the modules that feed this stage and are present in the microbatch.
        """

    def conditions(self) -> dict[str, Tensor]:
        """What the last forward pass gives each generator, beside its output; handed over once."""

    def backward(self, roots: Sequence[Root], gradients: Sequence[Tensor], *, is_last: bool) -> None:
        """Run the backward pass from outputs. is_last: it is the stage's last backward pass in the step."""


class EncoderModule(Protocol):
    """An encoder with its projector. Without items it returns [0, backbone_dim], with a graph to its parameters."""

    def __call__(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values [num_rows, row_dim] and sizes [num_items, size_dim] -> features [num_feature_rows, backbone_dim]."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class BackboneModule(Protocol):
    """The LLM. Without sequences it returns a loss of zero, with a graph to its parameters and to the features."""

    def __call__(
        self, sequences: PackedSequences, features: dict[str, Tensor]
    ) -> tuple[Tensor, int] | tuple[Tensor, int, dict[str, Tensor]]:
        """(sum of the loss over this rank's targets in float32 or float64, number of these targets).

        Of a model with generators, also generator -> rows at its queries, or of turns, in the order of its feature
        positions."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class GeneratorPart(Protocol):
    """A generator with its output projector. Without items it returns 0, with a graph to its parameters and to rows."""

    weight: float

    def __call__(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor:
        """The sum of the loss over this rank's items, from rows of the backbone, [sum(counts), dim].

        keys: of its items, int64 [num_items]: all that is random is drawn by them.
        counts: the rows of each item, int64 [num_items]."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class EncoderModules(Protocol):
    """Phase -> encoder, in the order in which encoders run: a dict or an nn.ModuleDict."""

    def __getitem__(self, phase: str) -> EncoderModule: ...

    def __iter__(self) -> Iterator[str]: ...


class Model(Protocol):
    """A multimodal model: encoders, and the backbone that takes in their features; perhaps `generators` as well."""

    encoders: EncoderModules
    backbone: BackboneModule


def generators_of(model: Model) -> Mapping[str, GeneratorPart]:
    """The model's generators by phase; a model may have no such attribute."""
    return getattr(model, "generators", {})


def modules_by_phase(model: Model) -> dict[str, EncoderModule | BackboneModule | GeneratorPart]:
    """Phase -> module, in the order in which modules run: encoders, then the backbone, then generators."""
    encoders = {phase: model.encoders[phase] for phase in model.encoders}
    return {**encoders, BACKBONE: model.backbone, **generators_of(model)}


def make_ahead(
    modules: Mapping[str, Collection[int]], model: Model, batch: RankBatch, device: torch.device, dtype: torch.dtype
) -> None:
    """Let modules make what their blocks will ask of the host for a microbatch, so that its step finds it.

    modules: which blocks of each. device, dtype: on which and in which they compute. Not a collective, and in whatever
    thread. What a module without `make_ahead` needs, it makes in its passes.
    """
    of_phase, generators = modules_by_phase(model), generators_of(model)
    for name, blocks in modules.items():
        make = None if name in generators else getattr(of_phase[name], "make_ahead", None)
        if make is None:
            continue
        with finding(name, batch.ahead):
            if name == BACKBONE:
                make(batch.sequences, blocks, device, dtype)
            else:
                make(*batch.media[name], batch.shared.get(name), blocks, device, dtype)


def is_trainable(module: EncoderModule | BackboneModule | GeneratorPart) -> bool:
    """Whether any parameter of the module requires a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())
