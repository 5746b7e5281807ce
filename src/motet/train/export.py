"""Writes trained modules as HF directories at the end of a run, with the tokenizer beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.data.drawn import DrawnVocabulary
from motet.data.text import ChatTokenizer
from motet.models.build import build_mllm
from motet.models.export import AdapterForm, export_hf
from motet.models.fused import stored_names, with_whole
from motet.models.lora_saved import check_peft
from motet.models.mllm import MLLM
from motet.models.whole.adapter import check_one_adapter
from motet.models.whole.export import export_whole
from motet.train.checkpoint.contents import Progress
from motet.train.processors import processors_of
from motet.train.world import World

if TYPE_CHECKING:
    from motet.train.recipe.recipe import Recipe


EXPORT = "export"
"""The folder in that of a run with what is exported at its end."""
_NAMED_AFTER = {"internlm2": ("Llama", "InternLM2"), "eva_clip": ("CLIP", "EVA-CLIP")}
"""Family that is published for code of its own -> what its layers are called after here, and whose code that is."""


class ExportConfig(BaseModel):
    """`[export]` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    at_end: bool = Field(
        False, description="write every module to export/ in the run's folder, as transformers reads it"
    )
    adapter: AdapterForm = Field(
        "saved",
        description='LoRA adapters: "saved" in adapters/ as peft reads them, the weights beside them only if model has '
        'no path for them; or "merged" into the weights',
    )


def export(
    model: MLLM, recipe: Recipe, folder: Path, world: World, progress: Progress, *, in_parts: bool = False
) -> None:
    """Gather the weights on rank 0, one tensor at a time, and write them to `folder`. A collective.

    in_parts: `model` is this rank's part; each weight is sent by the first rank that holds it.
    """
    state = gathered_weights(model, world)
    with world.together():
        if world.is_first:
            write_export(_layout(recipe) if in_parts else model, recipe, folder, state, progress)


def write_export(model: MLLM, recipe: Recipe, folder: Path, state: Mapping[str, Tensor], progress: Progress) -> None:
    """Write a model to `folder`, with a card that says what was trained.

    model: of the recipe, perhaps on meta. state: its whole weights by name. Raises as `export_hf` or `export_whole`.
    """
    from motet.train.recipe.whole import WholeRecipe  # A recipe has an `ExportConfig`.

    card = _card(recipe, progress.step)
    if not isinstance(recipe, WholeRecipe):
        # Of a part that is not there, the frozen weights are those of run.start, not those of its path.
        beside, adapter = progress.beside or {}, recipe.export.adapter
        bases = {name: path for name, path in recipe.modules.paths.items() if name in beside}
        beside_weights = {"bases": bases, "processors": processors_of(recipe)}
        export_hf(model, folder, state, recipe.data.tokenizer, adapter=adapter, card=card, **beside_weights)
        return
    export_whole(recipe.directory, model, folder, state, card, recipe.export.adapter)


def _card(recipe: Recipe, num_steps: int) -> str:
    """What was trained, for the model card."""
    run, model = recipe.run, recipe.modules
    learns = {BACKBONE: model.backbone.train}
    for name, part in model.encoders.items():
        learns |= {name: part.train_encoder, f"the projector of {name}": part.train_projector}
    for name, maker in model.generators.items():
        learns |= {name: maker.train_generator, f"the projector of {name}": maker.train_projector}
    frozen = [name for name, does in learns.items() if not does]
    steps = counted_words(run.num_steps, "step")
    steps = steps if num_steps == run.num_steps else f"{num_steps:,} of {steps}"
    examples = counted_words(run.batch_size, "example")
    adapters = [f"{name} by LoRA adapters of rank {lora.rank}" for name, lora in model.lora.items()]
    return (
        f"{steps} of {examples}, with a learning rate of {recipe.optimizer.lr:g} at its peak. "
        f"{'All parts learned' if not frozen else 'All parts learned but ' + ' and '.join(frozen)}"
        f"{', and of them not ' + ', '.join(model.freeze) if model.freeze else ''}"
        f"{', ' + ' and '.join(adapters) if adapters else ''}.{ends_of_answers(recipe.vocabulary())}"
    )


def ends_of_answers(vocabulary: ChatTokenizer | DrawnVocabulary) -> str:
    """By which tokens answers end, as a sentence; "" if by none.

    A model that had no turns before stops at another token by its generation_config.json.
    """
    if not isinstance(vocabulary, ChatTokenizer) or not (numbers := sorted(vocabulary.end_tokens)):
        return ""
    tokens = " or ".join(f"`{vocabulary.decode(np.array([number]), special=True)}`" for number in numbers)
    return f" Answers end by {tokens}: `generate(..., eos_token_id={numbers})` stops there."


def check_export(recipe: Recipe) -> None:
    """Raise UserError if the export at the end of a run would fail for want of a package, or replace what it is of."""
    if not recipe.export.at_end:
        return
    check_adapters(recipe)
    folder = recipe.run.dir / EXPORT
    for key, path in _paths_in("model", recipe.model.model_dump()):
        if path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{key} = {path} lies in {folder}, which export.at_end replaces: adapters would stand on weights that "
                "are gone; set another run.dir, or move it."
            )


def _paths_in(key: str, value: Any) -> Iterator[tuple[str, Path]]:
    """The paths in a table of a recipe, each with its key."""
    if isinstance(value, Path):
        yield key, value
    for name, each in value.items() if isinstance(value, dict) else ():
        yield from _paths_in(f"{key}.{name}", each)


def check_adapters(recipe: Recipe) -> None:
    """Raise UserError if adapters are to be saved and peft is not installed, or has no words for them."""
    from motet.train.recipe.whole import WholeRecipe

    if recipe.modules.lora and recipe.export.adapter == "saved":
        check_peft('export.adapter = "saved"')
        if isinstance(recipe, WholeRecipe):
            check_one_adapter(recipe.modules.lora)
            return
        for name in recipe.modules.lora:
            part = recipe.model.backbone if name == BACKBONE else recipe.model.encoders[name]
            if part.family in _NAMED_AFTER:
                ours, theirs = _NAMED_AFTER[part.family]
                raise UserError(
                    f'export.adapter = "saved" would name layers of {ours}, which {theirs}\'s own code has not; set '
                    'export.adapter = "merged".'
                )


def gathered_weights(model: MLLM, world: World) -> dict[str, Tensor]:
    """The whole weights by name on rank 0, on the CPU; nothing on the others. A collective.

    model: this rank's part, or all of it. What a family fuses is whole, as in a model that nobody has divided.
    """
    keys = stored_names(model)
    own, state = {keys[name]: each for name, each in model.state_dict().items()}, dict[str, Tensor]()
    holders: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    for rank, held in enumerate(world.gather([(name, each.shape, each.dtype) for name, each in own.items()])):
        for name, shape, dtype in held:
            holders.setdefault(name, (rank, shape, dtype))
    for name, (holder, shape, dtype) in holders.items():
        # Ranks that share a tensor put it together in the same order.
        whole = _whole(own[name]) if name in own else None
        if holder == world.rank == 0:
            assert whole is not None, "this rank holds it"
            state[name] = whole.cpu()
        elif holder == world.rank:
            assert whole is not None, "this rank holds it"
            dist.send(_as_bytes(whole.cpu()), 0, group=world.control)
        elif world.is_first:
            state[name] = torch.empty(shape, dtype=dtype)
            dist.recv(_as_bytes(state[name]), holder, group=world.control)
    return with_whole(state)


def _whole(tensor: Tensor) -> Tensor:
    """A tensor put together over the ranks that share it, axis by axis: torch warns of several at once."""
    if not isinstance(tensor, DTensor):
        return tensor
    for axis in reversed(range(tensor.device_mesh.ndim)):
        whole_behind = [Replicate()] * (tensor.device_mesh.ndim - axis)
        tensor = tensor.redistribute(placements=[*tensor.placements[:axis], *whole_behind])
    return tensor.to_local()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor: gloo does not send every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _layout(recipe: Recipe) -> MLLM:
    """The whole model of a recipe without its weights."""
    with torch.device("meta"):
        return build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size, getattr(torch, recipe.run.dtype))
