"""A model described by shapes alone, as in a recipe's `[model]`: to plan for models without an HF family.

[model.backbone]
num_layers = 80
hidden = 8192
mlp = 29568
num_heads = 64
num_kv_heads = 8
gated = true
norm = "rms"
biases = ["query", "key", "value"]
vocab_size = 152064

[model.encoders.image]                                         # the name of its column of lengths
kind = "vit"                                                   # or "audio": Whisper's encoder
num_layers = 45
hidden = 3200
mlp = 12800
num_heads = 25
projector = { kind = "mlp", downsample = 4 }

[model.generators.picture]                                     # the backbone feeds it at `num_queries` tokens
kind = "vit"
num_layers = 24
hidden = 1792
mlp = 7168
num_heads = 28
row_dim = 16
num_queries = 64
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from motet.core.limits import (
    MAX_HEADS,
    MAX_JOINED,
    MAX_LAYERS,
    MAX_MLP,
    MAX_QUERIES,
    MAX_TURN,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from motet.core.shapes import (
    BIASES,
    Activation,
    Norm,
    Transformer,
    audio_encoder,
    condition,
    connect,
    denoising_transformer,
    language_model,
    multimodal,
    query_tokens,
    vit,
)
from motet.core.spec import Layer, ModelSpec, Module


class _Layers(BaseModel):
    """Equal transformer layers of one shape (`core.shapes.Transformer`).

    num_layers:   the number of layers.
    hidden:       the width of a row.
    mlp:          the width of the MLP's inner row.
    num_heads:    heads of queries.
    num_kv_heads: heads of keys and values; 0 is num_heads.
    head_dim:     the width of a head; 0 is hidden / num_heads.
    gated:        the MLP is down(activation(gate(x)) * up(x)): three matrices.
    activation:   of the MLP.
    norm:         the kind of all norms.
    biases:       the products that have a bias.
    qk_norm:      queries and keys of each head are normalised.
    qk_norm_rows: queries and keys are normalised as whole rows of all heads (OLMo2).
    num_norms:    norms of whole rows in a layer: 2 before or after attention and MLP, 4 for both (Gemma3).
    layer_scale:  both residual branches are multiplied by a trainable vector.
    window:       the rows that a row attends to, itself included; 0 is all that attention allows.
    train:        whether the layers learn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    hidden: int = Field(gt=0, le=MAX_WIDTH)
    mlp: int = Field(gt=0, le=MAX_MLP)
    num_heads: int = Field(gt=0, le=MAX_HEADS)
    num_kv_heads: int = Field(0, ge=0, le=MAX_HEADS)
    head_dim: int = Field(0, ge=0, le=MAX_WIDTH)
    gated: bool = False
    activation: Activation = "gelu"
    norm: Norm = "layer"
    biases: tuple[str, ...] = BIASES
    qk_norm: bool = False
    layer_scale: bool = False
    window: int = Field(0, ge=0, le=2**30)
    qk_norm_rows: bool = False
    num_norms: int = Field(2, gt=0, le=4)
    num_experts: int = Field(0, ge=0, le=2**16, description="MLPs of a mixture, each of `mlp`; 0 is one MLP")
    experts_per_token: int = Field(0, ge=0, le=2**16, description="how many of them compute a row")
    train: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> _Layers:
        self.transformer()
        return self

    def transformer(self, causal: bool = False) -> Transformer:
        """The shape of one layer."""
        names = (field.name for field in fields(Transformer) if field.name != "causal")
        return Transformer(**{name: getattr(self, name) for name in names}, causal=causal)


class BackboneShape(_Layers):
    """`[model.backbone]`: a causal decoder with an embedding and an output layer.

    vocab_size: the number of tokens.
    tied:       the output layer's matrix is the embedding's.
    """

    vocab_size: int = Field(gt=0, le=MAX_VOCABULARY)
    tied: bool = False

    def module(self, queries: Layer | None = None) -> Module:
        """The backbone. queries: the tokens at which it feeds generators."""
        shape = self.transformer(causal=True)
        return language_model(
            shape, self.num_layers, self.vocab_size, tied=self.tied, trainable=self.train, queries=queries
        )


class ProjectorShape(BaseModel):
    """A projector of an encoder's rows into the backbone.

    kind:       one matrix, or two with GELU between them.
    downsample: rows that are joined into one before.
    train:      whether it learns.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    kind: Literal["linear", "mlp"] = "mlp"
    downsample: int = Field(default=1, gt=0, le=MAX_JOINED)
    train: bool = True


class EncoderShape(_Layers):
    """`[model.encoders.NAME]`: transformer layers after patches or convolutions.

    kind:          of images, "vit"; or of audio, after Whisper's convolutions.
    row_dim:       the number of values of a patch.
    class_row:     each image has one more row.
    num_positions: the length of the position table.
    num_mel_bins:  the number of values of an audio frame.
    """

    kind: Literal["vit", "audio"]
    row_dim: int = Field(588, gt=0, le=MAX_MLP)
    class_row: bool = False
    num_positions: int = Field(0, ge=0, le=MAX_MLP)
    num_mel_bins: int = Field(128, gt=0, le=MAX_WIDTH)
    projector: ProjectorShape = ProjectorShape()

    @model_validator(mode="after")
    def _of_its_kind(self) -> EncoderShape:
        others = {"vit": ("num_mel_bins",), "audio": ("row_dim", "class_row")}[self.kind]
        if stray := [name for name in others if name in self.model_fields_set]:
            raise ValueError(f"has {stray[0]}, which has no effect on an encoder of kind {self.kind!r}")
        return self

    @property
    def positions(self) -> int:
        """The length of the position table, 0 without one; that of Whisper is 1500 if it is not given."""
        return self.num_positions or (1500 if self.kind == "audio" else 0)

    @property
    def input_dim(self) -> int:
        """The number of values of a row of the encoder's input."""
        return self.row_dim if self.kind == "vit" else self.num_mel_bins

    def module(self, name: str, output_dim: int) -> Module:
        """The encoder with its projector. output_dim: width of the projector's output."""
        projector = self.projector
        return connect(self._inner(name), output_dim, projector.kind, projector.downsample, trainable=projector.train)

    def _inner(self, name: str) -> Module:
        shape, count = self.transformer(), self.num_layers
        if self.kind == "vit":
            sizes = {"row_dim": self.row_dim, "num_positions": self.positions}
            return vit(name, shape, count, class_row=self.class_row, trainable=self.train, **sizes)
        sizes = {"num_mel_bins": self.num_mel_bins, "num_positions": self.positions}
        return audio_encoder(name, shape, count, trainable=self.train, **sizes)


class OutputProjectorShape(BaseModel):
    """A projector of the backbone's rows into a generator.

    kind:  one matrix, or two with GELU between them.
    train: whether it learns, and with it the query tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    kind: Literal["linear", "mlp"] = "mlp"
    train: bool = True


class GeneratorShape(_Layers):
    """`[model.generators.NAME]`: transformer layers between patches and patches, which denoise the rows of an item.

    The rows of the item's condition and one of the timestep stand before them in all layers.

    kind:          layers are those of a vision transformer.
    row_dim:       the number of values of a patch, of latents or pixels.
    num_positions: the length of the position table; 0: queries and keys are turned by the position.
    condition:     what the backbone's rows are read at: "queries", or "turn", the text before the answer, of which an
                   item takes no row of the sequence.
    num_queries:   learned query tokens of an item in the backbone's sequence.
    max_turn:      the most rows of a turn, as of which items are priced.
    """

    kind: Literal["vit"]
    row_dim: int = Field(588, gt=0, le=MAX_MLP)
    num_positions: int = Field(0, ge=0, le=MAX_MLP)
    condition: Literal["queries", "turn"] = "queries"
    num_queries: int = Field(1, gt=0, le=MAX_QUERIES)
    max_turn: int | None = Field(None, gt=0, le=MAX_TURN)
    projector: OutputProjectorShape = OutputProjectorShape()

    @model_validator(mode="after")
    def _one_condition(self) -> GeneratorShape:
        is_turn = self.condition == "turn"
        if is_turn and self.max_turn is None:
            raise ValueError('`condition` = "turn" needs `max_turn`')
        if (other := "num_queries" if is_turn else "max_turn") in self.model_fields_set:
            raise ValueError(f'`condition` = "{self.condition}" excludes `{other}`')
        return self

    @property
    def num_conditions(self) -> int:
        """The rows of an item's condition; of turns the most."""
        return self.max_turn or self.num_queries

    def module(self, name: str, input_dim: int) -> Module:
        """The generator with its projector before it. input_dim: width of the backbone's rows."""
        inner = denoising_transformer(
            name,
            self.transformer(),
            self.num_layers,
            row_dim=self.row_dim,
            num_conditions=self.num_conditions,
            num_positions=self.num_positions,
            trainable=self.train,
        )
        return condition(inner, input_dim, self.projector.kind, self.num_conditions, trainable=self.projector.train)


class ModelShapes(BaseModel):
    """`[model]`: a model made of shapes.

    encoders:   by the name of the column of lengths that each computes on.
    generators: those that the backbone feeds, named likewise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    backbone: BackboneShape
    encoders: dict[str, EncoderShape] = Field(default_factory=dict)
    generators: dict[str, GeneratorShape] = Field(default_factory=dict)

    def spec(self, name: str) -> ModelSpec:
        """The model. Raises ArgumentError if two modules have one name."""
        width = self.backbone.hidden
        encoders = [shape.module(each, width) for each, shape in self.encoders.items()]
        generators = [shape.module(each, width) for each, shape in self.generators.items()]
        return multimodal(name, self.backbone.module(self._queries()), encoders, generators)

    def _queries(self) -> Layer | None:
        """The query tokens of all generators; None if there are none."""
        queried = [shape for shape in self.generators.values() if shape.condition == "queries"]
        if not queried:
            return None
        counts = {True: 0, False: 0}
        for shape in queried:
            counts[shape.projector.train] += shape.num_queries * self.backbone.hidden
        learn = counts[True] > 0
        frozen = counts[False] if learn else 0
        return query_tokens(sum(counts.values()), self.backbone.hidden, frozen=frozen, trainable=learn)
