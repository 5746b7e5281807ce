"""What is built of a model of shapes: its tables (`core/shape_tables.py`) as a `ModelConfig`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from motet.core.errors import UserError
from motet.core.shape_tables import BackboneShape, EncoderShape, GeneratorShape, ModelShapes
from motet.core.shapes import Transformer
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig
from motet.models.families.registry import SHAPED_BACKBONE, SHAPED_ENCODERS, Family
from motet.models.generator_config import GeneratorConfig
from motet.models.projector import ProjectorConfig


class ShapedBackboneConfig(BackboneConfig):
    """A backbone of shapes, with the options of `ShapedLMConfig`."""

    family: Literal["shapes"] = "shapes"

    @property
    def classes(self) -> Family:
        return SHAPED_BACKBONE


class ShapedEncoderConfig(EncoderConfig):
    """An encoder of shapes, with the options of its class in `SHAPED_ENCODERS`. family: the `kind` of its table."""

    family: Literal["vit", "audio"]

    @property
    def classes(self) -> Family:
        return SHAPED_ENCODERS[self.family]


class ShapedGeneratorConfig(GeneratorConfig):
    """A generator of shapes. config: the arguments of `ShapedDenoiser`, `shape` as the fields of `Transformer`."""

    family: Literal["shapes"] = "shapes"  # type: ignore[assignment]


def config_of_shapes(shapes: ModelShapes) -> ModelConfig:
    """The config of which `build_mllm` makes the model that `shapes.spec` describes.

    Raises UserError for what a spec can say and no module computes.
    """
    encoders = {name: _encoder(name, shape) for name, shape in shapes.encoders.items()}
    generators = {name: _generator(name, shape) for name, shape in shapes.generators.items()}
    return ModelConfig(backbone=_backbone(shapes.backbone), encoders=encoders, generators=generators)


def _backbone(table: BackboneShape) -> ShapedBackboneConfig:
    shape = table.transformer(causal=True)
    _check_computed("model.backbone", shape, rotated=True)
    options = _options(shape, table.num_layers, vocab_size=table.vocab_size, tie_word_embeddings=table.tied)
    return ShapedBackboneConfig(config=options, train=table.train)


def _encoder(name: str, table: EncoderShape) -> ShapedEncoderConfig:
    shape = table.transformer()
    _check_whole(f"model.encoders.{name}", shape, rotated=table.kind == "vit" and not table.num_positions)
    own: dict[str, Any] = {"num_mel_bins": table.num_mel_bins, "num_positions": table.positions}
    if table.kind == "vit":
        own = {"row_dim": table.row_dim, "class_row": table.class_row, "num_positions": table.positions}
    return ShapedEncoderConfig(
        family=table.kind,
        config=_options(shape, table.num_layers, **own),
        projector=ProjectorConfig(kind=table.projector.kind, downsample=table.projector.downsample),
        train_encoder=table.train,
        train_projector=table.projector.train,
    )


def _generator(name: str, table: GeneratorShape) -> ShapedGeneratorConfig:
    shape, where = table.transformer(), f"model.generators.{name}"
    _check_whole(where, shape, rotated=not table.num_positions)
    if shape.hidden % 2:
        raise UserError(
            f"{where}.hidden is {shape.hidden}: half of the row of a timestep are sines, the others cosines; take an "
            "even number."
        )
    own = {"row_dim": table.row_dim, "num_positions": table.num_positions}
    return ShapedGeneratorConfig(
        config=_options(shape, table.num_layers, **own),
        condition=table.condition,
        num_queries=table.num_queries if table.max_turn is None else None,
        max_turn=table.max_turn,
        projector=table.projector.kind,
        train_generator=table.train,
        train_projector=table.projector.train,
    )


def _options(shape: Transformer, num_layers: int, **own: Any) -> dict[str, Any]:
    fields = asdict(shape) | {"biases": list(shape.biases), "head_dim": shape.head_width}
    return {"shape": fields, "num_layers": num_layers, **own}


def _check_whole(where: str, shape: Transformer, *, rotated: bool) -> None:
    """As `_check_computed`, of a module that computes items."""
    _check_computed(where, shape, rotated=rotated)
    if shape.window:
        raise UserError(f"{where}.window is {shape.window}: rows attend to whole items; leave it out.")


def _check_computed(where: str, shape: Transformer, *, rotated: bool) -> None:
    if shape.num_experts:
        raise UserError(
            f"{where}.num_experts: training computes no mixture of experts yet; leave it out, or plan alone."
        )
    if shape.num_norms not in (2, 4):
        raise UserError(
            f"{where}.num_norms is {shape.num_norms}: a layer is computed with 2 norms, before attention and MLP, or "
            "with 4, before and after both."
        )
    if shape.qk_norm and shape.qk_norm_rows:
        raise UserError(f"{where}: queries and keys are normalised by head or as whole rows; set one of the two.")
    if rotated and shape.head_width % 2:
        raise UserError(
            f"{where}: heads of {shape.head_width} channels cannot be turned with the position, in pairs; their number "
            "must be even (head_dim, or hidden / num_heads)."
        )
