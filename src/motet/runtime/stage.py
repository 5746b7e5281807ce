"""What the runtime knows of a model: modules that it can call, which of them learn, and stages. It imports no model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from motet.core.workload import BACKBONE
from motet.dispatch.batch import PackedSequences, RankBatch


class ExecutableStage(Protocol):
    """What a rank runs of the model for a microbatch, as a Program numbers it; the executor's passes call it."""

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        """The output, on what the batch has of it; of a stage that feeds no other, a sum of losses, a scalar.

        inputs: by module, the outputs of the modules that feed it and are present.
        """

    def backward(self, output: Tensor, gradient: Tensor, *, is_last: bool) -> None:
        """The backward pass from an output. is_last: no later one of the step adds to the stage's gradients."""


class EncoderModule(Protocol):
    """An encoder with its projector; without items it returns [0, backbone_dim], connected to what is trainable."""

    def __call__(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values [rows, row_dim] and sizes [num_items, size_dim] to features [rows in the sequences, backbone_dim]."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class BackboneModule(Protocol):
    """The LLM. With no sequences it returns a zero loss, connected to its trainable parameters and to the features."""

    def __call__(self, sequences: PackedSequences, features: dict[str, Tensor]) -> tuple[Tensor, int]:
        """The sum of the loss over this rank's targets, float32 or better, and their number."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class EncoderModules(Protocol):
    """Encoders by phase, in the order in which they run: a dict, or an nn.ModuleDict."""

    def __getitem__(self, phase: str) -> EncoderModule: ...

    def __iter__(self) -> Iterator[str]: ...


class Model(Protocol):
    """A multimodal model: encoders, and the backbone that takes their features."""

    encoders: EncoderModules
    backbone: BackboneModule


def modules_by_phase(model: Model) -> dict[str, EncoderModule | BackboneModule]:
    """All modules by phase name, encoders first, in the order in which they run."""
    return {**{phase: model.encoders[phase] for phase in model.encoders}, BACKBONE: model.backbone}


def is_trainable(module: EncoderModule | BackboneModule) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
