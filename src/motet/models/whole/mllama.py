"""Llama 3.2 Vision (Dubey et al. 2024, section 7): the rows of images are keys of layers that attend to them.

An image has one token in the sequence. What goes along with it from the encoder's ranks to those of the sequence is one
wide row: its rows side by side, as many for each image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn
from transformers import MllamaConfig, MllamaForConditionalGeneration

from motet.core.arrays import Int64Array, rows_of_runs
from motet.core.errors import UserError
from motet.core.spec import Layer
from motet.models.layers import LayerModules, any_trainable
from motet.models.whole.family import TowerConfig, WholeBackboneConfig, WholeFamily, WholeParts, check_option, one_tower
from motet.models.whole.processor import CanvasTiles
from motet.models.whole.projector import StoredProjectorConfig, with_weights

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_TOWER = "model.vision_model."
_PROJECTOR = "model.multi_modal_projector."
_LIES = r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model."
"""Where the backbone lies. The output layer's prefix is the class's own, which transformers itself takes away."""


class KeyProjectorConfig(StoredProjectorConfig):
    """Llama 3.2 Vision's projector with stored weights. num_rows: as of `KeyProjector`."""

    num_rows: int

    def build(self, input_dim: int, output_dim: int) -> KeyProjector:  # type: ignore[override]
        """The projector, with its weights unless it has shapes only. Its dtype is that of the files."""
        return with_weights(KeyProjector(input_dim, output_dim, self.num_rows), self.tensors)


class KeyProjector(nn.Module):
    """A matrix with a bias on each row, and the `num_rows` rows of an image side by side as one wide row.

    Example:
        >>> import numpy as np, torch
        >>> projector = KeyProjector(8, 32, num_rows=5)
        >>> projector(torch.zeros(10, 8), np.array([5, 5])).shape
        torch.Size([2, 160])
    """

    kind, downsample = "keys", 1
    shareable = joins = True

    def __init__(self, input_dim: int, output_dim: int, num_rows: int) -> None:
        super().__init__()
        self.input_dim, self.num_rows = input_dim, num_rows
        self.output_dim = num_rows * output_dim
        self.linear = nn.Linear(input_dim, output_dim)

    @property
    def token_parts(self) -> int:
        """As of `core.spec.Module`: the rows side by side."""
        return self.num_rows

    @property
    def blocks(self) -> list[nn.Module]:
        """None: it is sharded with what stands outside of the encoder's blocks."""
        return []

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer, on the one wide row of each image."""
        weight = self.linear.weight
        layer = Layer(
            "projector",
            weights=self.num_rows * weight.numel(),
            parameters=weight.numel() + len(weight),
            output_width=self.output_dim,
            activation_width=self.num_rows * self.input_dim,
            item_rows=1,
            trainable=any_trainable(self),
        )
        return [LayerModules(layer, (self,))]

    def num_outputs(self, extents: Int64Array) -> Int64Array:
        """Wide rows of each image, int64 [num_items]: one."""
        return extents // self.num_rows

    def rows_for(self, extents: Int64Array, own: Int64Array) -> Int64Array:
        """The rows of which some wide rows are made, ascending, int64. own: these, int64."""
        return rows_of_runs(self.num_rows * own, np.full(len(own), self.num_rows))

    def of_each(self, rows: Tensor) -> Tensor:
        """rows [n, input_dim] -> what is made of each by itself, [n, output_dim / num_rows]."""
        return self.linear(rows)

    def forward(self, rows: Tensor, extents: Int64Array, own: Int64Array | None = None) -> Tensor:
        """rows [num_items * num_rows, input_dim] -> [num_items, output_dim].

        own: which wide rows are made, of what `of_each` has made of the rows that `rows_for` says; None: all.
        """
        rows = self.of_each(rows) if own is None else rows
        # FSDP refuses views as outputs.
        return rows.reshape(len(rows) // self.num_rows, self.output_dim).clone()


def _parts(config: MllamaConfig, directory: WholeDirectory) -> WholeParts:
    where, tower, text = str(directory.file), config.vision_config, config.text_config
    if not isinstance(tower.image_size, int) or not isinstance(tower.patch_size, int):
        raise UserError(
            f"{where}: image_size is {tower.image_size} and patch_size {tower.patch_size}; each must be one number."
        )
    inner, crossing = list(tower.intermediate_layers_indices), list(text.cross_attention_layers)
    _check_layers(where, "vision_config.intermediate_layers_indices", inner, 0, tower.num_hidden_layers)
    # Rows that enter before the first layer are rows of the sequence.
    _check_layers(where, "text_config.cross_attention_layers", crossing, 1, text.num_hidden_layers)
    check_option(
        where, "vision_config.vision_output_dim", tower.vision_output_dim, tower.hidden_size * (1 + len(inner))
    )
    num_rows = tower.max_num_tiles * (1 + (tower.image_size // tower.patch_size) ** 2)
    weights = {f"linear.{name}": f"{_PROJECTOR}{name}" for name in ("weight", "bias")}
    encoder = TowerConfig(
        family="mllama",
        path=directory.path,
        projector=KeyProjectorConfig(tensors=directory.tensors_at(weights), num_rows=num_rows),
    )
    sides = tuple((rows, columns) for rows, columns in tower.supported_aspect_ratios)
    return one_tower(
        WholeBackboneConfig(family="mllama", path=directory.path, keys={"image": num_rows}, lies=_LIES),
        "image",
        encoder,
        CanvasTiles(tower.patch_size, tower.image_size, sides),
        _TOWER,
        weights,
    )


def _check_layers(where: str, key: str, numbers: list[int], first: int, stop: int) -> None:
    """Raise UserError unless numbers of layers ascend from `first` on, and there is at least one."""
    if not numbers or numbers != sorted(set(numbers) & set(range(first, stop))):
        raise UserError(
            f"{where}: {key} is {numbers}; it must name layers {first} to {stop - 1} in order, one at least."
        )


MLLAMA = WholeFamily(MllamaForConditionalGeneration, _parts)
