"""A trained whole model as the directory that it came from, with other weights.

Files that transformers reads are copied: config, processor, tokenizer, template. Files of weights are written anew with
the same names, tensors and dtypes. What has its stored value still is as it was, bit by bit, whether it may learn or
not: a weight that is frozen now may have learned in a phase before. Weights in other formats are left out, as they
would be those from before.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.export import CARD, MADE_BY, in_place_of, model_card
from motet.models.load import INDEX
from motet.models.mllm import MLLM
from motet.models.whole.directory import WholeDirectory

_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_FOLDERS = ("additional_chat_templates",)


def export_whole(directory: WholeDirectory, mllm: MLLM, folder: Path, state: Mapping[str, Tensor], card: str) -> None:
    """Write the model to `folder`, in place of an earlier export there. Call it on one rank.

    mllm:  built of `directory`, perhaps on meta or sharded.
    state: whole tensors under the names of mllm.state_dict().
    card:  a paragraph for README.md.
    Raises KeyError if a weight is missing. Raises UserError for a weight that the directory has no place for, and if
    `folder` exists and is no export; nothing is written then.
    """
    folder = folder.absolute()
    if not _may_replace(folder):
        raise UserError(f"{folder} exists and is no export, which would be replaced; name another directory.")
    names = names_of(directory, mllm)
    weights = {names[name]: state[name] for name, _ in mllm.named_parameters(remove_duplicate=False)}
    with in_place_of(folder) as target:
        for path in sorted(directory.path.iterdir()):
            if path.is_dir() and path.name in _FOLDERS:
                shutil.copytree(path, target / path.name)
            elif path.is_file() and _is_copied(path.name):
                shutil.copyfile(path, target / path.name)
        for file, keys in directory.keys.items():
            _write_weights(file, keys, weights, target / file.name)
        (target / CARD).write_text(_card(directory, card))


def names_of(directory: WholeDirectory, mllm: MLLM) -> dict[str, str]:
    """Name in mllm.state_dict() -> name in transformers' class, for all weights. Raises UserError for one without."""
    names, known = {}, directory.shapes.state_dict()
    for name, plain in plain_names(mllm).items():
        own, theirs = next((each for each in directory.parts.names if plain.startswith(each[0])), ("", ""))
        names[name] = theirs + plain.removeprefix(own)
        if names[name] not in known:
            raise UserError(
                f"The model cannot be exported: {plain} has no place in {directory.path}, and transformers could not "
                "load it (nothing is written)."
            )
    return names


def _may_replace(folder: Path) -> bool:
    if not folder.exists():
        return True
    card = folder / CARD
    return folder.is_dir() and (
        not any(folder.iterdir()) or (card.is_file() and MADE_BY in card.read_text(errors="replace"))
    )


def _is_copied(name: str) -> bool:
    """Whether a file is none of weights, nor an index of such in another format."""
    if name.endswith(".index.json"):
        return name == INDEX
    return name.endswith(_COPIED) or name.upper().startswith(("LICENSE", "NOTICE"))


def _write_weights(file: Path, keys: Mapping[str, str], weights: Mapping[str, Tensor], target: Path) -> None:
    """A file with the weights that have changed in the place of the stored. keys: name in the file -> in the class."""
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118, the file is no mapping
        metadata = opened.metadata()
    for key, stored in tensors.items():
        weight = weights.get(keys.get(key, ""))
        if weight is not None and not torch.equal(weight.cpu(), stored.to(weight.dtype)):
            # A clone, as safetensors refuses tensors that share memory, which tied weights do.
            tensors[key] = weight.detach().to("cpu", stored.dtype, copy=True).contiguous()
    save_file(tensors, target, metadata)


def _card(directory: WholeDirectory, card: str) -> str:
    kind, name = directory.family.model.__name__, directory.path.name
    beside = "with the processor and the tokenizer that lie beside the weights"
    made = f"{MADE_BY} from {name}. transformers loads it as `{kind}`, {beside}."
    return model_card(f"{name}, trained further", name, (made, card))
