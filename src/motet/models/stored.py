"""Weights of an HF model as they lie in a directory's safetensors, to be read by the slice.

Only what needs nothing but other names is read so. What transformers would convert, untie, leave out or refuse is left
to `load.py`, which loads a module whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from motet.models.families.registry import Family
from motet.models.load import indexed_files, is_stray, key_mapping


@dataclass(frozen=True)
class TensorInFile:
    """A tensor in a safetensors file. The file is mapped only while it is read: mapped pages count as memory."""

    file: Path
    key: str

    def __getitem__(self, part: tuple[slice, ...] | EllipsisType) -> Tensor:
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_slice(self.key)[part].clone()


def stored_tensors(model: PreTrainedModel, family: Family, path: Path) -> dict[str, TensorInFile] | None:
    """Name in `model` -> tensor in `path`, as `from_pretrained` would load it, without reading any.

    model: of the family, on meta, without Blocks.
    None if slices do not suffice, or if anything is damaged, missing, of another shape or not part of the model.
    """
    needed = dict(model.named_parameters())
    names = model.state_dict()
    if names.keys() - needed.keys() - getattr(model, "all_tied_weights_keys", {}).keys():
        return None  # Buffers.
    files = _files(path)
    if (
        files is None
        or getattr(model.config, "quantization_config", None)
        or getattr(model.config, "transformers_weights", None)
    ):
        return None
    found: dict[str, TensorInFile] = {}
    transforms = get_model_conversion_mapping(model, key_mapping(family))
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    unexpected = is_stray(getattr(model.config, family.depth))
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118, the file is no mapping
                    name, conversion = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
                    if name not in names and key in names:
                        return None
                    if name not in names and (family.adapter or not unexpected(name)):
                        continue
                    # Also a tied weight that is stored twice: it would have to be the same.
                    if conversion is not None or name not in needed or name in found:
                        return None
                    if tuple(opened.get_slice(key).get_shape()) != tuple(needed[name].shape):
                        return None
                    found[name] = TensorInFile(file, key)
    except (OSError, SafetensorError):
        return None
    return found if found.keys() == needed.keys() else None


def _files(path: Path) -> list[Path] | None:
    """The files that transformers would read, or None if it would search further."""
    if any(path.glob("shard-*.safetensors")):
        return None
    whole = path / "model.safetensors"
    if whole.is_file():
        return [whole]
    return [path / name for name in sorted({name for name in indexed_files(path) if isinstance(name, str)})] or None
