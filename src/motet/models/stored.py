"""Weights of an HF model as they lie in a directory's safetensors, to be read by the slice.

Only what needs nothing but other names is read so. What transformers would convert, untie, leave out or refuse is left
to `load.py`, which loads a module whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from motet.models.families.registry import Family
from motet.models.load import is_quantised, is_stray, key_reader, weight_files

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
"""Evenly over a file; the first has its header."""


@dataclass(frozen=True)
class TensorInFile:
    """A tensor in a safetensors file. The file is mapped only while it is read: mapped pages count as memory.

    is_turned: whether its last two dimensions lie there the other way round.
    """

    file: Path
    key: str
    is_turned: bool = False

    def __getitem__(self, part: tuple[slice, ...] | EllipsisType) -> Tensor:
        if self.is_turned and isinstance(part, tuple):
            part = (*part[:-2], part[-1], part[-2])
        with safe_open(self.file, framework="pt") as opened:
            found = opened.get_slice(self.key)[part]
            return found.transpose(-1, -2).contiguous() if self.is_turned else found.clone()


def is_turned(model: PreTrainedModel, name: str, stored: Sequence[int]) -> bool:
    """Whether a weight lies in a file with its last two dimensions the other way round, as Qwen3-VL's experts do.

    stored: its shape there. transformers goes by the shape, too: a tensor of equal sides is taken as it is.
    """
    if not model.config.model_type.startswith(_TURNS_EXPERTS) or not _ALL_EXPERTS.search(name):
        return False
    num_experts, rows, columns = model.get_parameter(name).shape
    return rows != columns and tuple(stored) == (num_experts, columns, rows)


_ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
"""The end of the name of a tensor of all experts of a layer."""
_TURNS_EXPERTS = "qwen3_vl_moe"
"""The type, or its beginning, of models that are published with these tensors the other way round."""
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|w1|up_proj|w3|down_proj|w2)\.weight$")
"""The end of the name of one expert's matrix, which is a part of a tensor of all experts of the layer."""
_SECOND_ROWS = ("up_proj", "w3")


@dataclass(frozen=True)
class ExpertsInFiles:
    """A tensor of all experts of a layer, whose matrices lie in files one by one.

    matrices: of each expert, the tensors whose rows stand one below the other.
    """

    matrices: tuple[tuple[TensorInFile, ...], ...]

    def __getitem__(self, part: tuple[slice, ...] | EllipsisType) -> Tensor:
        experts, *others = part if isinstance(part, tuple) else (slice(None),)
        wanted = self.matrices[experts]
        return torch.stack([torch.cat([matrix[...] for matrix in of_expert])[tuple(others)] for of_expert in wanted])


class _Matrices:
    """Matrices of experts as they are found, by the tensor that has them all."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple[int, int], tuple[TensorInFile, tuple[int, ...]]]] = {}

    def add(self, name: str, key: str, tensor: TensorInFile, shape: tuple[int, ...]) -> bool:
        """Whether the key names a matrix of an expert, which is new."""
        if (place := _OF_EXPERT.search(key)) is None:
            return False
        number = int(place[1]), int(place[2] in _SECOND_ROWS)
        of_name = self._found.setdefault(name, {})
        if number in of_name:
            return False
        of_name[number] = tensor, shape
        return True

    def tensors(self, needed: Mapping[str, Tensor]) -> dict[str, ExpertsInFiles]:
        """The tensors of which all matrices are there, in their shapes. needed: by name, for their shapes."""
        whole = {}
        for name, found in self._found.items():
            num_experts, num_rows, width = needed[name].shape
            numbers = sorted(found)
            parts = len({part for _, part in numbers})
            shapes = {shape for _, shape in found.values()}
            if numbers == [(e, p) for e in range(num_experts) for p in range(parts)] and shapes == {
                (num_rows // parts, width)
            }:
                of_experts = (tuple(found[e, p][0] for p in range(parts)) for e in range(num_experts))
                whole[name] = ExpertsInFiles(tuple(of_experts))
        return whole


def stored_tensors(
    model: PreTrainedModel, family: Family, path: Path
) -> dict[str, TensorInFile | ExpertsInFiles] | None:
    """Name in `model` -> tensor in `path`, as `from_pretrained` would load it, without reading any.

    model: of the family, on meta, without Blocks.
    None if slices do not suffice, or if anything is damaged, missing, quantised, of another shape or not part of the
    model.
    """
    needed = dict(model.named_parameters())
    names = model.state_dict()
    if names.keys() - needed.keys() - getattr(model, "all_tied_weights_keys", {}).keys():
        return None  # Buffers.
    files = weight_files(path)
    if (
        files is None
        or getattr(model.config, "quantization_config", None)
        or getattr(model.config, "transformers_weights", None)
    ):
        return None
    found: dict[str, TensorInFile | ExpertsInFiles] = {}
    of_experts = _Matrices()
    name_of = key_reader(model, family)
    unexpected = is_stray(getattr(model.config, family.depth))
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118, the file is no mapping
                    name, conversion = name_of(key)
                    if name not in names and key in names:
                        return None
                    if name not in names and (family.is_part or not unexpected(name)):
                        continue
                    # Also a tied weight that is stored twice: it would have to be the same.
                    if name not in needed or name in found or is_quantised(opened.get_slice(key).get_dtype()):
                        return None
                    if conversion is not None and not _ALL_EXPERTS.search(key):
                        shape = tuple(opened.get_slice(key).get_shape())
                        if not of_experts.add(name, key, TensorInFile(file, key), shape):
                            return None
                        continue
                    shape = tuple(opened.get_slice(key).get_shape())
                    turned = is_turned(model, name, shape)
                    if not turned and shape != tuple(needed[name].shape):
                        return None
                    found[name] = TensorInFile(file, key, turned)
    except (OSError, SafetensorError):
        return None
    found |= of_experts.tensors(needed)
    return found if found.keys() == needed.keys() else None


def weights_digest(path: Path) -> str:
    """Tells whether a directory has other weights than another, by headers, sizes and samples of its safetensors."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.glob("*.safetensors")):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name} {size_bytes} ".encode())
        with open(file, "rb") as opened:
            for number in range(_SAMPLES):
                opened.seek(number * max(size_bytes - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
