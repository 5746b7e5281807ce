"""Whole models that Motet does not know, whose class splits by transformers' own conventions.

Such a class has `get_image_features`, `get_placeholder_mask` and `language_model`, and its forward puts the rows of
images where their tokens stand and runs the language model, nothing else. That is tried on the class itself before
anything trains: forward runs once, with stand-ins for its features, its language model and its output layer, and what
these are given must be what Motet will compute. So is the processor, on two pictures and a text. What differs is said.

The encoder is the class without its language model, whole on one rank: images of one size, in one call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import transformers
from PIL import Image
from pydantic import ConfigDict
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoProcessor, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.models.config_file import one_line, quiet_transformers
from motet.models.exact import keep_float64
from motet.models.initialise import compute_buffers
from motet.models.layers import LayerModules
from motet.models.projector import ProjectorConfig
from motet.models.whole.family import (
    WholeBackboneConfig,
    WholeEncoderConfig,
    WholeFamily,
    WholeParts,
    backbone_names,
    language_family,
)
from motet.models.whole.processor import ByProcessor, opened_processor

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_NEEDED = ("get_image_features", "get_placeholder_mask", "language_model", "get_input_embeddings")
_LANGUAGE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose logits are their output layer on their last norm, and nothing more."""
_PICTURES = ((40, 28), (17, 60))
"""(width, height) of the pictures that a processor is tried on."""


class Unchanged(nn.Module):
    """A projector that leaves rows as they are: the encoder has the model's own.

    Example:
        >>> Unchanged(8)(torch.ones(2, 8), np.array([2])).shape
        torch.Size([2, 8])
    """

    kind, downsample = "unchanged", 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_dim = self.output_dim = width

    @property
    def blocks(self) -> list[nn.Module]:
        """None."""
        return []

    def described(self, divisor: int) -> list[LayerModules]:
        """No layer."""
        return []

    def num_outputs(self, extents: Int64Array) -> Int64Array:
        """The rows that it is given."""
        return extents

    def forward(self, rows: Tensor, extents: Int64Array) -> Tensor:
        return rows


class UnchangedConfig(ProjectorConfig):
    """No projector."""

    def build(self, input_dim: int, output_dim: int) -> Unchanged:  # type: ignore[override]
        """Raises UserError if rows do not have the backbone's width."""
        if input_dim != output_dim:
            raise UserError(f"get_image_features makes rows of {input_dim} values, and the backbone takes {output_dim}")
        return Unchanged(input_dim)


class ImageFeatures(nn.Module):
    """transformers' class without its language model, as an encoder of packed items.

    shape: (channels, height, width) of an image. num_rows: that it becomes, and that its values lie in.
    options: what the class's forward gives its `get_image_features` beside the pixels.
    Adapters may be beside any of its linear layers on which its rows depend, as none of them is known to be of a block.
    """

    adapts_all = True

    def __init__(
        self, model: nn.Module, shape: tuple[int, int, int], num_rows: int, width: int, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.model, self.output_dim = model, width
        self._shape, self._num_rows, self._options = shape, num_rows, dict(options)

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Rows of each image, int64 [num_items]: all the same."""
        return np.full(len(sizes), self._num_rows, dtype=np.int64)

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values: [rows of all images, row_dim] -> [num_outputs of all, output_dim]."""
        pixels = values.reshape(len(sizes), *self._shape)
        features = self.model.get_image_features(pixel_values=pixels, **self._options)
        return features.pooler_output.reshape(-1, self.output_dim)


class FeaturesConfig(WholeEncoderConfig):
    """The encoder of such a model. directory: from which it is read; the others as of `ImageFeatures`.

    unused: weights on which no row depends. They do not learn, as they have no gradient, and are no parameters here.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    is_of_whole: ClassVar[bool] = True
    directory: Any
    shape: tuple[int, int, int]
    num_rows: int
    options: dict[str, Any]
    unused: tuple[str, ...]

    def own_encoder(self) -> nn.Module:
        """The encoder with its weights, unless it has shapes only. Its dtype is that of the files."""
        whole = _laid_out(self.directory)
        inner, width = whole.model, whole.config.get_text_config().hidden_size
        if torch.get_default_device().type != "meta":
            compute_buffers(whole)
        del inner.language_model
        if torch.get_default_device().type != "meta":
            stored = {name for keys in self.directory.keys.values() for name in keys.values()}
            held = [name for name in inner.state_dict() if f"model.{name}" in stored]
            tensors = self.directory.tensors_at({name: f"model.{name}" for name in held})
            inner.load_state_dict({name: tensor[...] for name, tensor in tensors.items()}, strict=False, assign=True)
        keep_float64(inner)
        for name in self.unused:
            owner, _, weight = name.rpartition(".")
            kept = inner.get_submodule(owner)._parameters.pop(weight)
            inner.get_submodule(owner).register_buffer(weight, kept.detach(), persistent=False)
        return ImageFeatures(inner, self.shape, self.num_rows, width, self.options)


def generic_family(path: Path, kind: Any, known: str) -> WholeFamily:
    """A family that Motet does not know, by the type in its config.json. known: the types that it knows.

    Raises UserError for a type of no model of images and text, and for a class that lacks a convention.
    """
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    model = getattr(transformers, name, None) if name and kind in CONFIG_MAPPING else None
    why = "transformers has no class of that type that reads images and text"
    if model is not None:
        inner = getattr(inspect.getmodule(model), name.replace("ForConditionalGeneration", "Model"), None)
        lacks = [each for each in ("get_image_features", "get_placeholder_mask") if not hasattr(inner, each)]
        if not lacks:
            return WholeFamily(model, _parts)
        why = f"{name} does not split by transformers' conventions: it has no {' and no '.join(lacks)}"
    raise UserError(
        f"model.path: {path} holds a model of type {kind!r}, and whole models are {known}, and others that split by "
        f"transformers' conventions; {why}: name the parts, by [model.backbone] and [model.encoders.NAME]."
    )


def _parts(config: PreTrainedConfig, directory: WholeDirectory) -> WholeParts:
    family = language_family(config, str(directory.file), *_LANGUAGE)
    shape = _made_by_processor(directory.path)
    num_rows, options, unused = _tried(directory, shape)
    form = _form(config, directory.path, num_rows)
    encoder = FeaturesConfig(
        directory=directory,
        shape=shape,
        num_rows=num_rows,
        options=options,
        unused=unused,
        projector=UnchangedConfig(),
    )
    backbone = WholeBackboneConfig(
        family=family, path=directory.path, config={"tie_word_embeddings": config.tie_word_embeddings}
    )
    return WholeParts(
        backbone,
        {"image": encoder},
        (*backbone_names(), ("encoders.image.encoder.model.", "model.")),
        {"image": ByProcessor(shape, _rows_of_values(shape, num_rows))},
        {"image": form},
    )


def _rows_of_values(shape: tuple[int, int, int], num_rows: int) -> int:
    """Rows that an image's values lie in: as many as come out, where they divide the values, so that lengths tell."""
    return num_rows if math.prod(shape) % num_rows == 0 else shape[1]


def _laid_out(directory: WholeDirectory) -> PreTrainedModel:
    """A new model of the class on meta."""
    with quiet_transformers(), torch.device("meta"):
        return directory.family.model(directory.hf_config)


def _made_by_processor(path: Path) -> tuple[int, int, int]:
    """(channels, height, width) of the pixels of any image. Raises UserError where they differ, or come with more."""
    processor, where = opened_processor(path)
    shapes = set()
    for width, height in _PICTURES:
        try:
            made = processor(images=_picture(width, height), return_tensors="np")
        except Exception as error:
            raise UserError(f"{where} cannot be tried ({one_line(error)}).") from error
        if more := sorted(made.keys() - {"pixel_values"}):
            raise UserError(f"{where} makes {more[0]} beside pixel_values, which is not understood in such a model.")
        shapes.add(tuple(np.shape(made["pixel_values"])))
    shape = shapes.pop()
    if shapes or len(shape) != 4 or shape[0] != 1:
        raise UserError(f"{where} does not bring all images to one size, which such a model must.")
    return shape[1:]


def _picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _form(config: PreTrainedConfig, path: Path, num_rows: int) -> tuple[str, str]:
    """The token of an image, and what the processor puts for it, with one token. Raises UserError for anything else."""
    try:
        with quiet_transformers():
            processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"model.path: the processor of {path} cannot be opened ({one_line(error)}).") from error
    processor.image_processor = opened_processor(path)[0]
    where, picture = f"model.path: the {type(processor).__name__} of {path}", _picture(*_PICTURES[0])
    token, tokenizer = getattr(processor, "image_token", None), processor.tokenizer
    if not isinstance(token, str) or tokenizer.convert_tokens_to_ids(token) != config.image_token_id:
        raise UserError(f"{where} names {token!r} as the token of an image, which config.json does not.")
    try:
        pixels = processor.image_processor(images=picture, return_tensors="pt")
        put = (
            processor.replace_image_token(pixels, 0) if hasattr(processor, "replace_image_token") else token * num_rows
        )
        made = processor(images=[picture], text=[f"a {token} b"])["input_ids"][0]
    except Exception as error:
        raise UserError(f"{where} cannot be tried ({one_line(error)}).") from error
    if put.count(token) != num_rows or token * num_rows not in put:
        raise UserError(
            f"{where} puts {counted_words(put.count(token), 'token')} for an image, and {num_rows} rows in one run are "
            "what the model makes of it."
        )
    if list(made) != tokenizer(f"a {put} b")["input_ids"]:
        raise UserError(f"{where} writes an image into a text in a way that is not understood.")
    return token, put.replace(token * num_rows, token)


class _Stub(nn.Module):
    """A language model that keeps what it is given."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states, self.given = states, dict[str, Any]()

    def forward(self, **given: Any) -> BaseModelOutputWithPast:
        self.given = given
        return BaseModelOutputWithPast(last_hidden_state=self._states)


def _tried(directory: WholeDirectory, shape: tuple[int, int, int]) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    """Rows of an image, what forward gives `get_image_features` beside pixels, and the weights on which no row depends.

    Raises UserError for a class whose forward does anything but put rows at their tokens and run its language model.
    """
    where = f"model.path: {directory.family.model.__name__} of {directory.path}"
    whole = _laid_out(directory)
    inner = getattr(whole, "model", None)
    for owner, names in ((inner, _NEEDED), (whole, ("lm_head",))):
        if lacks := [name for name in names if not hasattr(owner, name)]:
            raise UserError(f"{where} does not split by transformers' conventions: it has no {lacks[0]}.")
    assert inner is not None, "checked above"
    calls: list[dict[str, Any]] = []
    width, image = whole.config.get_text_config().hidden_size, directory.hf_config.image_token_id
    try:
        of_one = inner.get_image_features(pixel_values=torch.zeros(1, *shape, device="meta")).pooler_output
        num_rows = of_one.numel() // width
        of_one.sum().backward()
        weights = {name: each for name, each in inner.named_parameters() if not name.startswith("language_model.")}
        unused = tuple(name for name, each in weights.items() if each.grad is None)
        rows = torch.arange(2.0 * num_rows * width).reshape(2, *of_one.shape[1:]) if of_one.ndim == 3 else None
        rows = torch.arange(2.0 * num_rows * width).reshape(-1, width) if rows is None else rows
        words = [token for token in range(4) if token != image][:3]
        runs = [image] * num_rows
        ids = torch.tensor([[words[0], *runs, words[1], *runs, words[2]]])
        states = torch.rand(1, ids.shape[1], width)

        def features(pixel_values: Tensor, **options: Any) -> Any:
            calls.append(options)
            return BaseModelOutputWithPooling(pooler_output=rows)

        inner.get_image_features, inner.language_model, whole.lm_head = features, _Stub(states), nn.Identity()
        inner.get_input_embeddings = lambda: lambda tokens: tokens[..., None] + torch.zeros(width)
        pixels, mask = torch.zeros(2, *shape), torch.ones_like(ids)
        logits = whole(input_ids=ids, pixel_values=pixels, attention_mask=mask, use_cache=False).logits
    except Exception as error:
        raise UserError(f"{where} cannot be tried ({type(error).__name__}: {one_line(error)}).") from error
    expected = ids[..., None] + torch.zeros(width)
    expected[ids == image] = rows.reshape(-1, width)
    if problem := _problem(inner.language_model.given, expected, mask, calls):
        raise UserError(f"{where} cannot be trained as parts that Motet does not know: {problem}.")
    if not torch.equal(logits, states):
        raise UserError(
            f"{where} cannot be trained as parts that Motet does not know: its logits are not its lm_head's."
        )
    return num_rows, calls[0], unused


def _problem(given: dict[str, Any], expected: Tensor, mask: Tensor, calls: list[dict[str, Any]]) -> str:
    """What a forward does that is not understood, as a clause; "" if nothing."""
    given = dict(given)
    if len(calls) != 1 or any(isinstance(value, Tensor) for value in calls[0].values()):
        return "its forward calls get_image_features in another way than with pixels alone"
    embeds, positions, seen = (given.pop(key, None) for key in ("inputs_embeds", "position_ids", "attention_mask"))
    if embeds is None or embeds.shape != expected.shape or not torch.equal(embeds, expected):
        return "its language model is given other embeddings than those of tokens, with the rows of images at theirs"
    if positions is not None and not torch.equal(positions, torch.arange(expected.shape[1])[None]):
        return "its language model is given positions of its own"
    if seen is not None and not torch.equal(seen, mask):
        return "its language model is given a mask of its own"
    others = [key for key, value in given.items() if value is not None and not isinstance(value, bool | str)]
    return f"its language model is given {others[0]}" if others else ""
