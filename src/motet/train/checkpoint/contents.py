"""What a checkpoint consists of, and whether it is whole. It is data: reading it runs nothing, and needs no torch.

    rank-00000.safetensors, ...   the shards that a rank wrote, by global name
    tensors.json                  shape and dtype of every tensor, and which part of it lies in which file
    state.json                    how far the run was, and what the order of its examples follows from
    manifest.json                 size and SHA-256 of each file above, and a SHA-256 of itself; written last

A checkpoint is whole if every byte is as it was written. The checksums find damage, not malice: who can write into a
checkpoint can write a manifest too. Malice is met by the formats, none of which can name code.

Later formats keep the manifest a JSON object with `format` and `sha256`, the latter of its other keys as compact JSON
with sorted keys, so that a checkpoint of a later Motet is told from a damaged one.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

import motet
from motet.core.errors import UserError

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.json"
FORMAT = 1
_EARLIER = ".metadata"  # The pickle of Motet's first format, torch's own.
_NAME = re.compile(r"step-(\d+)")
_BLOCK_BYTES = 1 << 20


class Damaged(Exception):
    """A checkpoint is not as it was written; the text says which file, and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a resumed run must know beside weights: the same on all ranks, whatever their number.

    step: steps done. num_skipped: those of them that changed nothing, as they were not finite. position: examples
    consumed, over all ranks. num_bad: examples dropped as unreadable.
    seed, dataset: what the order of examples follows from (dataset: the identity of the index).
    """

    step: int
    position: int
    num_bad: int
    seed: int
    dataset: str
    num_skipped: int = 0


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunState(_Stored):
    """`state.json`: a run's Progress, and who wrote it.

    launch: of torchrun, the same for all its attempts; "" if there was none. written: when saving began.
    """

    step: int = Field(ge=0, lt=2**53)
    num_skipped: int = Field(ge=0, lt=2**53)
    position: int = Field(ge=0, lt=2**53)
    num_bad: int = Field(ge=0, lt=2**53)
    seed: int
    dataset: str
    num_ranks: int = Field(gt=0)
    launch: str
    written: AwareDatetime

    @model_validator(mode="after")
    def _parts_of_a_whole(self) -> RunState:
        if self.num_skipped > self.step or self.num_bad > self.position:
            raise ValueError("more steps were skipped than done, or more examples dropped than there were")
        return self

    @property
    def progress(self) -> Progress:
        return Progress(**self.model_dump(include={field.name for field in dataclasses.fields(Progress)}))


class File(_Stored):
    """A file's entry in the manifest."""

    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class CheckpointManifest(_Stored):
    """`manifest.json` without its own checksum. motet: the version that wrote it. files: by name."""

    format: int
    motet: str
    files: dict[str, File]


class Shard(_Stored):
    """The part of a tensor that begins at `offsets` and has `shape`, under the tensor's name in `file`."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(_Stored):
    """One tensor of a checkpoint. dtype: as torch calls it, such as float32. shape: of all shards together."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


_TENSORS = TypeAdapter(dict[str, StoredTensor])


def name_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_named(checkpoint: Path) -> int | None:
    """The step in a folder's name, if that is the name of a checkpoint."""
    named = _NAME.fullmatch(checkpoint.name)
    return int(named[1]) if named else None


def is_checkpoint(folder: Path) -> bool:
    """Whether Motet has written this, whole or not, now or in an earlier version."""
    return any((folder / name).is_file() for name in (MANIFEST, STATE))


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Raises Damaged, or UserError for a format that is not read here."""
    path = checkpoint / MANIFEST
    with _judged(path):
        if not checkpoint.is_dir():
            raise Damaged("there is no such folder")
        if not path.exists() and (checkpoint / _EARLIER).exists():
            raise UserError(
                f"{checkpoint} was written by an earlier version of Motet as a pickle, which can run code when it is "
                "opened and so is not: go on with that version, or start anew with --resume never."
            )
        body = dict(json.loads(_read(path)))
        if body.pop("sha256", None) != _sha256_of(body):
            raise Damaged(f"{MANIFEST} is not as it was written, by its own checksum")
        if body.get("format") != FORMAT:
            raise UserError(
                f"{checkpoint} was written by Motet {body.get('motet')} in the format {body.get('format')}, and Motet "
                f"{motet.__version__} reads the format {FORMAT}: update Motet."
            )
        manifest = CheckpointManifest.model_validate(body)
    if absent := [name for name in (STATE, TENSORS) if name not in manifest.files]:
        raise Damaged(f"{MANIFEST} does not name {absent[0]}")
    return manifest


def read_state(checkpoint: Path) -> RunState:
    """Raises Damaged, also if the folder has the name of another step, and UserError if it may not be read."""
    with _judged(checkpoint / STATE):
        state = RunState.model_validate_json(_read(checkpoint / STATE))
    if step_named(checkpoint) not in (None, state.step):
        raise Damaged(f"{STATE} is of step {state.step}, and the folder's name is of another")
    return state


def read_tensors(checkpoint: Path) -> dict[str, StoredTensor]:
    """Every tensor by name. Raises Damaged, and UserError if it may not be read."""
    files = read_manifest(checkpoint).files
    with _judged(checkpoint / TENSORS):
        tensors = _TENSORS.validate_json(_read(checkpoint / TENSORS))
    for name, tensor in tensors.items():
        for shard in tensor.shards:
            if shard.file not in files:
                raise Damaged(f"{TENSORS} has '{name}' in {shard.file}, which {MANIFEST} does not name")
        if not _is_covered(tensor):
            raise Damaged(f"{TENSORS} has '{name}' in shards that do not make up its shape {tensor.shape}")
    return tensors


def _is_covered(tensor: StoredTensor) -> bool:
    """Whether shards lie within their tensor and are as large as it is: what no shard holds would not be loaded."""
    # Of a tensor with fewer rows than ranks, several shards are empty and in one place.
    shards = [shard for shard in tensor.shards if math.prod(shard.shape)]
    within = all(
        len(shard.offsets) == len(shard.shape) == len(tensor.shape)
        and all(0 <= at <= at + size <= whole for at, size, whole in zip(shard.offsets, shard.shape, tensor.shape))
        for shard in shards
    )
    size = sum(math.prod(shard.shape) for shard in shards)
    return within and len({shard.offsets for shard in shards}) == len(shards) and size == math.prod(tensor.shape)


def verify(checkpoint: Path, part: int = 0, num_parts: int = 1, show: Callable[[int], None] | None = None) -> RunState:
    """Read and check every byte of a checkpoint, or of one of `num_parts` parts of its files that together are all.

    show: is told the number of bytes read since it was last told. Raises Damaged for the first file that is not as it
    was written, and UserError for what cannot be judged: a format that is not read here, a file that may not be read.
    """
    files = read_manifest(checkpoint).files
    for name in [STATE, *sorted(files.keys() - {STATE})[part::num_parts]]:
        with _judged(checkpoint / name):
            size_bytes, stated = _size_of(checkpoint / name), files[name]
            if size_bytes != stated.size_bytes:
                raise Damaged(f"{name} has {size_bytes:,} bytes, and had {stated.size_bytes:,}")
            if sha256(checkpoint / name, show) != stated.sha256:
                raise Damaged(f"{name} is not as it was written, by its checksum")
    return read_state(checkpoint)


def sha256(path: Path, show: Callable[[int], None] | None = None) -> str:
    """Of a file's bytes, in hexadecimal, as `sha256sum` prints it."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            digest.update(block[:num_bytes])
            if show is not None:
                show(num_bytes)
    return digest.hexdigest()


def complete(folder: Path, files: Mapping[str, File], tensors: Mapping[str, StoredTensor], state: RunState) -> None:
    """Make a folder that holds the ranks' `files` a checkpoint; all of it is on the disk when this returns.

    Raises OSError, also if a file of a rank is not there.
    """
    for name, file in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            raise OSError(
                f"rank 0 does not see {name} as it was written: run.dir must be on a disk that all ranks share"
            )
    texts = {TENSORS: _TENSORS.dump_json(dict(tensors)), STATE: state.model_dump_json(indent=1).encode()}
    small = {name: File(size_bytes=len(text), sha256=hashlib.sha256(text).hexdigest()) for name, text in texts.items()}
    body = CheckpointManifest(format=FORMAT, motet=motet.__version__, files={**files, **small}).model_dump()
    texts[MANIFEST] = json.dumps(body | {"sha256": _sha256_of(body)}, indent=1).encode()
    for name, text in texts.items():
        (folder / name).write_bytes(text)
        sync(folder / name)
    sync(folder)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _size_of(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path.name} is no file")
    return status.st_size


def _read(path: Path) -> bytes:
    _size_of(path)  # A pipe would be waited for.
    return path.read_bytes()


@contextmanager
def _judged(path: Path) -> Iterator[None]:
    """What goes wrong in reading a file, as what it means for the checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise Damaged(f"{path.name} is missing") from error
        if error.errno == errno.EIO:
            raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
        # The next attempt, or another user, may well be able to.
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "its content"
        raise Damaged(f"{path.name} is not what Motet writes: {where}: {first['msg']}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{path.name} is not what Motet writes: no JSON object") from error
