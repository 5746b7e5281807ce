"""Projectors whose weights lie in the directory of a whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from motet.core.arrays import Int64Array
from motet.core.shapes import projector
from motet.models.cross_projector import CrossProjector
from motet.models.layers import LayerModules, any_trainable
from motet.models.projector import Projector, ProjectorConfig
from motet.models.stored import TensorInFile

Built = TypeVar("Built", bound=nn.Module)


class StoredProjectorConfig(ProjectorConfig):
    """A projector of the kinds that there are, with stored weights. tensors: by their names in the projector."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    tensors: dict[str, TensorInFile]

    def build(self, input_dim: int, output_dim: int) -> Projector | CrossProjector:
        """The projector, with its weights unless it has shapes only. Its dtype is that of the files."""
        return with_weights(super().build(input_dim, output_dim), self.tensors)


class NormedProjectorConfig(StoredProjectorConfig):
    """InternVL's projector."""

    def build(self, input_dim: int, output_dim: int) -> Projector:
        """The projector, with its weights unless it has shapes only. Its dtype is that of the files."""
        return with_weights(NormedProjector(input_dim, output_dim, self), self.tensors)


class NormedProjector(Projector):
    """InternVL's projector: rows of a square joined, a norm over all of them, and an MLP.

    Example:
        >>> import numpy as np
        >>> projector = NormedProjector(8, 32, ProjectorConfig(downsample=4))
        >>> projector.num_outputs(np.array([[4, 6]])).tolist()
        [6]
    """

    def __init__(self, input_dim: int, output_dim: int, config: ProjectorConfig) -> None:
        super().__init__(input_dim, output_dim, config)
        self.layers = nn.Sequential(nn.LayerNorm(input_dim * self.downsample), *self.layers)

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer. divisor: length of an item that makes one row of the encoder's output."""
        [described] = super().described(divisor)
        layer, joined = described.layer, self.input_dim * self.downsample
        # A norm keeps its input, and the first matrix its output.
        layer = replace(
            layer,
            parameters=layer.parameters + 2 * joined,
            activation_width=layer.activation_width + joined + 2,
            inner_weights=layer.weights,
        )
        return [LayerModules(layer, (self,))]


class UnbiasedProjectorConfig(StoredProjectorConfig):
    """Idefics3's projector."""

    def build(self, input_dim: int, output_dim: int) -> Projector:
        """The projector, with its weights unless it has shapes only. Its dtype is that of the files."""
        return with_weights(UnbiasedProjector(input_dim, output_dim, self), self.tensors)


class UnbiasedProjector(Projector):
    """Idefics3's projector: rows of a square joined, and a matrix.

    Example:
        >>> import numpy as np
        >>> projector = UnbiasedProjector(8, 32, ProjectorConfig(kind="linear", downsample=9))
        >>> projector.num_outputs(np.array([[6, 6]])).tolist(), sum(each.numel() for each in projector.parameters())
        ([4], 2304)
    """

    def __init__(self, input_dim: int, output_dim: int, config: ProjectorConfig) -> None:
        super().__init__(input_dim, output_dim, config)
        self.layers = nn.Sequential(nn.Linear(input_dim * self.downsample, output_dim, bias=False))

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer. divisor: length of an item that makes one row of the encoder's output."""
        [described] = super().described(divisor)
        return [LayerModules(replace(described.layer, parameters=described.layer.weights), (self,))]


class PooledProjectorConfig(StoredProjectorConfig):
    """Gemma 3's projector. pool, eps: as of `PooledProjector`."""

    pool: int
    eps: float

    def build(self, input_dim: int, output_dim: int) -> PooledProjector:
        """The projector, with its weights unless it has shapes only. Its dtype is that of the files."""
        return with_weights(PooledProjector(input_dim, output_dim, self.pool, self.eps), self.tensors)


class PooledProjector(nn.Module):
    """Gemma 3's projector: the mean over squares of an image's rows, a norm, and a matrix.

    pool: rows of a square's side, of which each side of an image has a whole number. eps: of the norm.

    Example:
        >>> import numpy as np
        >>> PooledProjector(8, 32, pool=2, eps=1e-6).num_outputs(np.array([[4, 6]])).tolist()
        [6]
    """

    kind = "pooled"

    def __init__(self, input_dim: int, output_dim: int, pool: int, eps: float) -> None:
        super().__init__()
        self.input_dim, self.output_dim, self.pool, self.downsample = input_dim, output_dim, pool, pool**2
        self.norm = Gemma3RMSNorm(input_dim, eps=eps)
        self.weight = nn.Parameter(torch.zeros(input_dim, output_dim))

    @property
    def blocks(self) -> list[nn.Module]:
        """None: it is sharded with what stands outside of the encoder's blocks."""
        return []

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer. divisor: length of an item that makes one row of the encoder's output."""
        layer = projector(
            self.input_dim, self.output_dim, "linear", divisor=divisor * self.downsample, trainable=any_trainable(self)
        )
        # A norm in place of the matrix's bias.
        layer = replace(
            layer,
            parameters=layer.weights + self.input_dim,
            activation_width=self.input_dim * (self.downsample + 1),
            inner_weights=layer.weights,
        )
        return [LayerModules(layer, (self,))]

    def num_outputs(self, extents: Int64Array) -> Int64Array:
        """Output rows of each image, int64 [num_items]."""
        return (extents // self.pool).prod(axis=1)

    def forward(self, rows: Tensor, extents: Int64Array) -> Tensor:
        """rows [sum(rows of an image), input_dim] -> [sum(num_outputs), output_dim]. extents: sides, [num_items, 2]."""
        pooled = []
        for (height, width), image in zip(extents.tolist(), rows.split(extents.prod(axis=1).tolist())):
            squares = image.reshape(height // self.pool, self.pool, width // self.pool, self.pool, -1)
            pooled.append(squares.mean((1, 3)).flatten(0, 1))
        return self.norm(torch.cat(pooled)) @ self.weight


def with_weights(module: Built, tensors: dict[str, TensorInFile]) -> Built:
    """A projector with stored weights in place of its own, unless it has shapes only."""
    if torch.get_default_device().type != "meta":
        for name, parameter in module.named_parameters():
            parameter.data = tensors[name][...].to(parameter.device)
    return module
