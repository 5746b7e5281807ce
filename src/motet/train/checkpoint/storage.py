"""The storage of checkpoints for torch DCP: a safetensors file a rank, without pickle.

DCP decides which rank writes which shard (each once) and which parts of shards a rank reads (under any sharding), and
saves in a thread. DCP's own storage is not used: its file format is a pickle, which can execute code when it is read.
Its safetensors writer copies a rank's tensors once more, has no checksums, and reads all headers on every rank.

Rows of a tensor are saved and loaded like tensors, by the keys of `models/fused.py`, and kept as shards of the whole.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from motet.core.files import sync
from motet.models.fused import NamedSlice
from motet.train.checkpoint.contents import File, Shard, StoredTensor, sha256

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class _Written:
    """What a rank sends to rank 0 for a shard that it has written."""

    shard: Shard
    file: File


@dataclass(frozen=True)
class _ShardPlace:
    """Where a shard lies: in the tensor `key` of a file, behind so many rows, or columns."""

    file: str
    key: str
    behind: int = 0
    dim: int = 0


class StoredSlice:
    """Rows, or columns, of a tensor of a checkpoint, as a tensor of their own.

    tensor: with the parts of its shards that have some of them. places: offsets of each -> where it lies.
    """

    def __init__(self, whole: StoredTensor, part: NamedSlice) -> None:
        shards, self.places, dim = [], dict[tuple[int, ...], _ShardPlace](), part.dim
        for shard in whole.shards:
            first = shard.offsets[dim]
            begin, end = max(first, part.first), min(first + shard.shape[dim], part.stop)
            if begin < end:
                offsets = _with(shard.offsets, dim, begin - part.first)
                update = {"offsets": offsets, "shape": _with(shard.shape, dim, end - begin)}
                shards.append(shard.model_copy(update=update))
                self.places[offsets] = _ShardPlace(shard.file, shard.key or part.name, begin - first, dim)
        shape = _with(whole.shape, dim, max(0, min(part.stop, whole.shape[dim]) - part.first))
        self.tensor = StoredTensor(dtype=whole.dtype, shape=shape, shards=tuple(shards))


class Writer(StorageWriter):
    """Writes the shards of each rank into a new folder; then rank 0 completes it.

    start:  called on rank 0 before any rank writes, to make the folder.
    finish: called on rank 0 after the files of all ranks are on the disk, with name -> file and name -> tensor.
    If anything fails on a rank, DCP raises CheckpointException on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        start: Callable[[], None],
        finish: Callable[[dict[str, File], dict[str, StoredTensor]], None],
    ) -> None:
        self._folder, self._start, self._finish = folder, start, finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._start()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards into one file. Done when it returns."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name, path = plan.storage_data, self._folder / plan.storage_data
        tensors = _in_own_memory({item.index.fqn: planner.resolve_data(item).detach() for item in plan.items})
        assert len(tensors) == len(plan.items), "a rank writes one shard of a tensor"
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path)
        path.chmod(mode)  # The usual permissions: safetensors lets only the owner read.
        sync(path)
        file = File(size_bytes=path.stat().st_size, sha256=sha256(path))
        return [
            WriteResult(item.index, tensor.nbytes, _Written(_shard(name, item.index, tensor), file))
            for item, tensor in zip(plan.items, tensors.values(), strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hand on which files were written and where each tensor's shards are. On the coordinator, after all ranks."""
        files: dict[str, File] = {}
        shards: dict[str, list[Shard]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            files[written.shard.file] = written.file
            shards[_whole_of(result.index.fqn)].append(written.shard)
        types, shapes = dict[str, str](), dict[str, tuple[int, ...]]()
        for key, stored in metadata.state_dict_metadata.items():
            name, part, shape = _whole_of(key), NamedSlice.of(key), tuple(stored.size)
            types[name] = str(stored.properties.dtype).removeprefix("torch.")
            if part is not None:
                known = shapes[name][part.dim] if name in shapes else 0
                shape = _with(shape, part.dim, max(known, part.stop))
            shapes[name] = shape
        tensors = {
            name: StoredTensor(dtype=types[name], shape=shape, shards=tuple(shards[name]))
            for name, shape in shapes.items()
        }
        self._finish(files, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads the parts of a checkpoint's tensors that a rank needs, from memory-mapped files."""

    def __init__(
        self,
        checkpoint: Path,
        tensors: dict[str, StoredTensor],
        slices: Mapping[str, StoredSlice] = MappingProxyType({}),
    ) -> None:
        """slices: by key, of these tensors, which are read too."""
        self._checkpoint = checkpoint
        self._tensors = tensors | {key: each.tensor for key, each in slices.items()}
        self._places = {
            (name, shard.offsets): _ShardPlace(shard.file, shard.key or name)
            for name, stored in tensors.items()
            for shard in stored.shards
        }
        for key, each in slices.items():
            self._places |= {(key, offsets): place for offsets, place in each.places.items()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The shapes, types and shards of all tensors, in torch's terms; no file is read."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=_DTYPES[stored.dtype]),
                    torch.Size(stored.shape),
                    [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.shape)) for s in stored.shards],
                )
                for name, stored in self._tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing more is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank's plan asks for, opening each file once. Done when it returns."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._place(item.storage_index).file].append(item)
        for file, items in by_file.items():
            with safe_open(self._checkpoint / file, framework="pt") as stored:
                for item in items:
                    _read(stored, item, self._place(item.storage_index), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> _ShardPlace:
        return self._places[index.fqn, tuple(index.offset or ())]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def first_line(error: BaseException) -> str:
    """The first line of an error; for a CheckpointException, of the error of the first rank that failed."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")


def _shard(file: str, index: MetadataIndex, tensor: Tensor) -> Shard:
    offsets = tuple(index.offset or ())
    if (part := NamedSlice.of(index.fqn)) is None:
        return Shard(file=file, offsets=offsets, shape=tuple(tensor.shape))
    offsets = offsets or (0,) * tensor.ndim
    offsets = _with(offsets, part.dim, part.first + offsets[part.dim])
    return Shard(file=file, offsets=offsets, shape=tuple(tensor.shape), key=index.fqn)


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """The sizes, or offsets, with another one in a dimension."""
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _whole_of(key: str) -> str:
    """The name of the tensor that a key names, or a part of which it names."""
    part = NamedSlice.of(key)
    return key if part is None else part.name


def _in_own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each contiguous and in memory of its own, as safetensors needs them."""
    taken: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if address in taken else tensor.contiguous()
        taken.add(address)
    return tensors


def _read(stored: Any, item: ReadItem, place: _ShardPlace, planner: LoadPlanner) -> None:
    """Copy a part of a stored tensor to where DCP wants it. Raises ValueError if dtype or shape differ."""
    offsets = tuple(item.storage_offsets)
    starts = _with(offsets, place.dim, offsets[place.dim] + place.behind) if offsets else offsets
    region = tuple(slice(start, start + length) for start, length in zip(starts, item.lengths))
    target, name = planner.resolve_tensor(item).detach(), item.storage_index.fqn
    part = stored.get_slice(place.key)[region]
    # `copy_` would silently convert the dtype and broadcast the shape.
    if (part.dtype, part.shape) != (target.dtype, target.shape):
        raise ValueError(f"'{name}' is {part.dtype} {tuple(part.shape)}, not {target.dtype} {tuple(target.shape)}")
    target.copy_(part)
    planner.commit_tensor(item, target)
