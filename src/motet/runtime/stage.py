"""The interface that the runtime expects of a model: modules, whether they are trainable, and stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from motet.core.workload import BACKBONE
from motet.dispatch.batch import PackedSequences, RankBatch


class ExecutableStage(Protocol):
    """One stage of a Program, with its weights; `StagePasses` calls it for each microbatch."""

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        """The output for a microbatch; the last stage returns the sum of its losses, a scalar.

        inputs: module -> its output, for the modules that feed this stage and are present in the microbatch.
        """

    def backward(self, output: Tensor, gradient: Tensor, *, is_last: bool) -> None:
        """Run the backward pass from an output. is_last: it is the stage's last backward pass in the step."""


class EncoderModule(Protocol):
    """An encoder with its projector. Without items it returns [0, backbone_dim], with a graph to its parameters."""

    def __call__(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values [num_rows, row_dim] and sizes [num_items, size_dim] -> features [num_feature_rows, backbone_dim]."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class BackboneModule(Protocol):
    """The LLM. Without sequences it returns a loss of zero, with a graph to its parameters and to the features."""

    def __call__(self, sequences: PackedSequences, features: dict[str, Tensor]) -> tuple[Tensor, int]:
        """(sum of the loss over this rank's targets in float32 or float64, number of these targets)."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class EncoderModules(Protocol):
    """Phase -> encoder, in the order in which encoders run: a dict or an nn.ModuleDict."""

    def __getitem__(self, phase: str) -> EncoderModule: ...

    def __iter__(self) -> Iterator[str]: ...


class Model(Protocol):
    """A multimodal model: encoders, and the backbone that takes in their features."""

    encoders: EncoderModules
    backbone: BackboneModule


def modules_by_phase(model: Model) -> dict[str, EncoderModule | BackboneModule]:
    """Phase -> module, in the order in which modules run: encoders, then the backbone."""
    return {**{phase: model.encoders[phase] for phase in model.encoders}, BACKBONE: model.backbone}


def is_trainable(module: EncoderModule | BackboneModule) -> bool:
    """Whether any parameter of the module requires a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())
