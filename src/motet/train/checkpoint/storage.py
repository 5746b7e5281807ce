"""Where torch DCP writes a checkpoint to and reads it from: a safetensors file a rank, and no pickle.

DCP plans (which rank writes which shard, each once; which parts of which shards a rank reads, under any sharding) and
runs the save in a thread. Its own file format is a pickle that `load` executes, and its safetensors writer makes a
second copy of a rank's tensors in memory, has no checksums, and reads the header of every file on every rank.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
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

from motet.train.checkpoint.contents import File, Shard, StoredTensor, sha256, sync

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class _Written:
    """What a rank tells rank 0 of a shard: where it is, and the file that it is in."""

    shard: Shard
    file: File


class Writer(StorageWriter):
    """Writes each rank's shards into a new folder; then rank 0 completes it.

    start: called on rank 0 before any rank writes, to make the folder. finish: called on rank 0 after every rank's file
    is on its disk, with the files by name and the tensors by name. What either raises, or any rank, all ranks are told.
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
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name, path = plan.storage_data, self._folder / plan.storage_data
        tensors = _apart({item.index.fqn: planner.resolve_data(item).detach() for item in plan.items})
        assert len(tensors) == len(plan.items), "of a tensor, a rank writes one shard"
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path)
        path.chmod(mode)  # Who may read the folder may read the file; safetensors would let its owner alone.
        sync(path)
        file = File(size_bytes=path.stat().st_size, sha256=sha256(path))
        return [
            WriteResult(item.index, tensor.nbytes, _Written(_shard(name, item.index, tensor), file))
            for item, tensor in zip(plan.items, tensors.values(), strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, File] = {}
        shards: dict[str, list[Shard]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            files[written.shard.file] = written.file
            shards[result.index.fqn].append(written.shard)
        tensors = {
            name: StoredTensor(
                dtype=str(stored.properties.dtype).removeprefix("torch."),
                shape=tuple(stored.size),
                shards=tuple(shards[name]),
            )
            for name, stored in metadata.state_dict_metadata.items()
        }
        self._finish(files, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads the parts that a rank needs of a checkpoint's tensors, through a map of its files."""

    def __init__(self, checkpoint: Path, tensors: dict[str, StoredTensor]) -> None:
        self._checkpoint, self._tensors = checkpoint, tensors
        self._files = {(name, shard.offsets): shard.file for name, stored in tensors.items() for shard in stored.shards}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._file(item.storage_index)].append(item)
        for file, items in by_file.items():
            with safe_open(self._checkpoint / file, framework="pt") as stored:
                for item in items:
                    _read(stored, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file(self, index: MetadataIndex) -> str:
        return self._files[index.fqn, tuple(index.offset or ())]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def first_line(error: BaseException) -> str:
    """What went wrong, of an error of DCP on the first rank that had one, or of any other."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")


def _shard(file: str, index: MetadataIndex, tensor: Tensor) -> Shard:
    return Shard(file=file, offsets=tuple(index.offset or ()), shape=tuple(tensor.shape))


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each contiguous and in memory of its own, as safetensors wants them."""
    taken: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in taken else tensor.contiguous()
        taken.add(place)
    return tensors


def _read(stored: Any, item: ReadItem, planner: LoadPlanner) -> None:
    region = tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths))
    target, name = planner.resolve_tensor(item).detach(), item.storage_index.fqn
    part = stored.get_slice(name)[region]
    # `copy_` would convert and repeat numbers without a word.
    if (part.dtype, part.shape) != (target.dtype, target.shape):
        raise ValueError(f"'{name}' is {part.dtype} {tuple(part.shape)}, not {target.dtype} {tuple(target.shape)}")
    target.copy_(part)
    planner.commit_tensor(item, target)
