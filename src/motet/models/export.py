"""A trained MLLM back to directories that transformers reads: safetensors and config.json a module.

directory/backbone/                   AutoModelForCausalLM.from_pretrained
directory/encoders/<name>/            the family's HF class; of a module of the user's own, model.safetensors alone
directory/projectors/<name>.safetensors
directory/hooks/<name>.<hook>.safetensors    of hooks that have weights
directory/tokenizer/                  if one is given

All is checked before anything is written, and the directory gets its name when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.config_file import quiet_transformers
from motet.models.module import MLLM


def export_hf(
    mllm: MLLM, directory: Path, state_dict: Mapping[str, Tensor] | None = None, tokenizer: Path | None = None
) -> None:
    """Write every module of `mllm` as `directory`, in the dtype of the weights; an earlier export there is replaced.

    state_dict: whole tensors under the names of mllm.state_dict(); default: those of `mllm` itself, which must not be
    sharded then. tokenizer: a directory to be copied beside them. Call it on one rank.
    Raises KeyError if a weight is missing, and UserError for a model that holds weights which a fresh model of its
    config has not (adapters), and if something else than an export stands at `directory`.
    """
    directory = directory.absolute()
    state = mllm.state_dict() if state_dict is None else state_dict
    is_free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not is_free and not (directory / "backbone").is_dir():
        raise UserError(f"{directory} exists and is no export, which would be replaced; name another directory.")
    parts = [
        _Part(path, module, _weights(module, state, prefix), is_hf) for path, module, prefix, is_hf in _parts(mllm)
    ]
    fresh = {part.path: _fresh(part) for part in parts if part.is_hf}
    with _whole(directory) as target:
        for part in parts:
            if part.is_hf:
                _write_model(part, fresh[part.path], target / part.path)
            elif part.weights:
                file = target / f"{part.path}.safetensors"
                file.parent.mkdir(parents=True, exist_ok=True)
                # Copies of their own: safetensors refuses tensors that share memory, as tied weights do.
                save_file({name: tensor.clone() for name, tensor in part.weights.items()}, file)
        if tokenizer is not None:
            shutil.copytree(tokenizer, target / "tokenizer")


class _Part(NamedTuple):
    """A module with weights, under the names that it has without Blocks; path: of its directory, or file."""

    path: str
    module: nn.Module
    weights: dict[str, Tensor]
    is_hf: bool


def _parts(mllm: MLLM) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Path, module, its prefix in the state dict, and whether transformers writes it, of all that may have weights."""
    yield "backbone", mllm.backbone.causal_lm, "backbone.causal_lm.", True
    hooks: list[tuple[str, Any, str]] = [
        ("backbone.before", mllm.backbone.before_backbone, "backbone.before_backbone.")
    ]
    for name, module in mllm.encoders.items():
        encoder, prefix = module.encoder, f"encoders.{name}."
        model = getattr(encoder, "model", None)
        # A class of the user's own may hold an HF model and weights beside it, which HF would not write.
        if isinstance(model, PreTrainedModel) and all(key.startswith("model.") for key in encoder.state_dict()):
            yield f"encoders/{name}", model, f"{prefix}encoder.model.", True
        else:
            yield f"encoders/{name}/model", encoder, f"{prefix}encoder.", False
        yield f"projectors/{name}", module.projector, f"{prefix}projector.", False
        hooks += [(f"{name}.{hook}", getattr(module, hook), f"{prefix}{hook}.") for hook in ("before", "after")]
    for name, hook, prefix in hooks:
        if isinstance(hook, nn.Module):
            yield f"hooks/{name}", hook, prefix, False


def _weights(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {plain: state[prefix + name].detach().cpu().contiguous() for name, plain in plain_names(module).items()}


def _fresh(part: _Part) -> PreTrainedModel:
    """A model of the same config without storage, which has the names that transformers will look for.

    The one that trains has Blocks, and may be sharded. Raises UserError if the weights are not those of this model.
    """
    kind = type(part.module)
    with quiet_transformers(), torch.device("meta"):
        fresh = kind(deepcopy(part.module.config)).to(next(iter(part.weights.values())).dtype)
    held, wanted = (
        {name: tensor.shape for name, tensor in each.items()} for each in (part.weights, fresh.state_dict())
    )
    strange = next((name for name in held | wanted if held.get(name) != wanted.get(name)), None)
    if strange is not None:
        raise UserError(
            f"{part.path} cannot be exported: {strange} is not as in a {kind.__name__} of its config, and "
            "transformers could not load it; merge adapters into the weights that they change, and remove them "
            "(nothing is written)."
        )
    return fresh


def _write_model(part: _Part, fresh: PreTrainedModel, target: Path) -> None:
    with quiet_transformers():
        fresh.save_pretrained(target, state_dict=part.weights)
    if part.module.can_generate():
        # As it was read, also where transformers would not let it be saved.
        part.module.generation_config.to_json_file(target / "generation_config.json")


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A directory beside `directory` to write to, which takes its place at the end; what stood there goes then."""
    writing, old = (directory.parent / f".{directory.name}.{state}" for state in ("writing", "old"))
    for left in (writing, old):
        shutil.rmtree(left, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        yield writing
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    if directory.exists():
        directory.rename(old)
    writing.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
