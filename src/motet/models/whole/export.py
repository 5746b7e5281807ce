"""A trained whole model as the directory that it came from, with other weights.

Files that transformers reads are copied: config, processor, tokenizer, template. Files of weights are written anew with
the same names, tensors and dtypes. What has its stored value still is as it was, bit by bit, whether it may learn or
not: a weight that is frozen now may have learned in a phase before. Weights in other formats are left out, as they
would be those from before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.copied_files import copy_beside_weights
from motet.models.export import CARD, MADE_BY, AdapterForm, in_place_of, model_card
from motet.models.load import INDEX
from motet.models.lora_saved import merged, without_lora
from motet.models.mllm import MLLM
from motet.models.named_weights import is_lora
from motet.models.whole.adapter import ADAPTER, WholeAdapter, beside
from motet.models.whole.directory import WholeDirectory

_VOICES = "spk_dict.pt"
"""The voices of Qwen2.5-Omni, without which transformers does not read its directory."""


def export_whole(
    directory: WholeDirectory,
    mllm: MLLM,
    folder: Path,
    state: Mapping[str, Tensor],
    card: str,
    adapter: AdapterForm = "saved",
) -> None:
    """Write the model to `folder`, in place of an earlier export there. Call it on one rank.

    mllm:    built of `directory`, perhaps on meta or sharded.
    state:   whole tensors under the names of mllm.state_dict().
    card:    a paragraph for README.md.
    adapter: LoRA adapters are "merged" into the weights; or "saved" alone, as peft reads them, with all else that has
             changed. Where peft cannot save that (weights beside adapters that have changed), the directory is written
             as well, and they stand on it.
    Raises KeyError if a weight is missing. Raises UserError for a weight that the directory has no place for, if
    `folder` exists and is no export, and for adapters that are saved without peft; nothing is written then.
    """
    folder = folder.absolute()
    if not _may_replace(folder):
        raise UserError(f"{folder} exists and is no export, which would be replaced; name another directory.")
    places, plain = names_of(directory, mllm), plain_names(mllm)
    held = {plain[name]: state[name] for name, _ in mllm.named_parameters(remove_duplicate=False)}
    theirs = {plain[name]: place for name, place in places.items()}
    is_saved = adapter == "saved" and any(map(is_lora, held))
    of_model = without_lora(held) if is_saved else merged(mllm, held)
    weights = {theirs[name]: weight for name, weight in of_model.items()}
    changed = _changed(directory, weights)
    saved = WholeAdapter.of(directory, mllm, held, theirs) if is_saved else None
    has_model = saved is None or not saved.fits_beside(changed)
    with in_place_of(folder) as target:
        if has_model:
            _write_directory(directory, changed, target)
        if saved is not None:
            base, beside_it = (folder, dict[str, Tensor]()) if has_model else (directory.path, changed)
            saved.save(base, weights, beside_it, target / ADAPTER)
        (target / CARD).write_text(_card(directory, card, saved is not None, has_model))


def names_of(directory: WholeDirectory, mllm: MLLM) -> dict[str, str]:
    """Name in mllm.state_dict() -> name in transformers' class, for all weights. Raises UserError for one without.

    An adapter's is that of the weight beside it, with its own end.
    """
    names, known = {}, directory.shapes.state_dict()
    for name, plain in plain_names(mllm).items():
        own, theirs = next((each for each in directory.parts.names if plain.startswith(each[0])), ("", ""))
        names[name] = theirs + plain.removeprefix(own)
        if beside(names[name]) not in known:
            raise UserError(
                f"The model cannot be exported: {plain} has no place in {directory.path}, and transformers could not "
                "load it (nothing is written)."
            )
    return names


def _changed(directory: WholeDirectory, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, by transformers' names, that are not as they are stored."""
    changed = {}
    for file, keys in directory.keys.items():
        with safe_open(file, framework="pt") as opened:
            for key, name in keys.items():
                weight, stored = weights.get(name), opened.get_tensor(key)
                if weight is not None and not torch.equal(weight.cpu(), _as(stored, weight).to(weight.dtype)):
                    changed[name] = weight
    return changed


def _write_directory(directory: WholeDirectory, changed: Mapping[str, Tensor], target: Path) -> None:
    copy_beside_weights(directory.path, target, also=(INDEX, _VOICES))
    for file, keys in directory.keys.items():
        _write_weights(file, keys, changed, target / file.name)


def _may_replace(folder: Path) -> bool:
    if not folder.exists():
        return True
    card = folder / CARD
    return folder.is_dir() and (
        not any(folder.iterdir()) or (card.is_file() and MADE_BY in card.read_text(errors="replace"))
    )


def _write_weights(file: Path, keys: Mapping[str, str], changed: Mapping[str, Tensor], target: Path) -> None:
    """A file with the weights that have changed in the place of the stored. keys: name in the file -> in the class."""
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118, the file is no mapping
        metadata = opened.metadata()
    for key, stored in tensors.items():
        if (weight := changed.get(keys.get(key, ""))) is not None:
            # A clone, as safetensors refuses tensors that share memory, which tied weights do.
            tensors[key] = _as(weight.detach(), stored).to("cpu", stored.dtype, copy=True).contiguous()
    save_file(tensors, target, metadata)


def _as(weight: Tensor, other: Tensor) -> Tensor:
    """A weight as another one lies: experts may do so with two dimensions the other way round (`stored.is_turned`)."""
    return weight if weight.shape == other.shape else weight.transpose(-1, -2)


def _card(directory: WholeDirectory, trained: str, has_adapter: bool, has_model: bool) -> str:
    kind, name = directory.family.model.__name__, directory.path.name
    beside_it = "with the processor and the tokenizer that lie beside the weights"
    model = f"transformers loads it as `{kind}`, {beside_it}." if has_model else ""
    base = "this directory" if has_model else name
    adapter = f"`peft.PeftModel.from_pretrained` loads `{ADAPTER}/` on top of the `{kind}` of {base}."
    made = " ".join(filter(None, (f"{MADE_BY} from {name}.", model, adapter if has_adapter else "")))
    return model_card(f"{name}, trained further", name, (made, trained))
