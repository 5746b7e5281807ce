"""What a checkpoint consists of, and whether it is whole. Reading it executes no code of it, and needs no torch.

    rank-00000.safetensors, ...   the shards that a rank wrote, by global name
    tensors.json                  shape and dtype of every tensor, and which part of it lies in which file
    state.json                    how far the run was, and what determines the order of its examples
    manifest.json                 size and SHA-256 of each file above, and a SHA-256 of itself; written last

A checkpoint is whole if every byte is as it was written. Checksums find damage, not attacks: an attacker who can change
a checkpoint can change its manifest. What protects against attacks is that no format here can contain code.

A later format must keep the manifest a JSON object with `format` and `sha256`: the SHA-256 of its other keys as compact
JSON with sorted keys. So Motet can distinguish a checkpoint of a later version from a damaged one.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

import motet
from motet.core.errors import UserError
from motet.core.files import sync

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.json"
FORMAT = 1
_EARLIER = ".metadata"  # The pickle of Motet's first format, torch's own.
_NAME = re.compile(r"step-(\d+)")
_BLOCK_BYTES = 1 << 20


class Damaged(Exception):
    """A checkpoint is not as it was written. The text names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a resumed run must know beside weights and optimizer state; the same on all ranks and any number of ranks.

    step:        steps done.
    position:    examples consumed, over all ranks.
    num_bad:     examples dropped as unreadable.
    seed:        of the order of examples.
    dataset:     fingerprint of the index, on which the order also depends.
    num_skipped: steps that changed nothing, because they were not finite.
    group:       the caps of groups by phase, on which their order also depends; None without groups.
    shuffle:     whether the order is a shuffled one; None in checkpoints that do not say it.
    mixture:     weights of the manifests in whole numbers, on which the order also depends; () without.
    start:       the digest of the checkpoint whose weights the run began with (`run.start`); "" without.
    beside:      of parts with LoRA adapters, whose frozen weights a checkpoint lacks, what says which those are. Parts
                 are not there whose frozen weights came from `start`: checkpoints have them.
    scales:      by what the LoRA adapters of each part are multiplied; None in checkpoints that do not say it.
    optimizer:   its name; "" in checkpoints that do not say it.
    stated:      what the recipe says of inputs, model and targets (`same_run.py`); None in checkpoints without it.
    own_files:   the files of the user's own that the recipe names, and digests of their texts, likewise.
    loss_scale, num_finite: the `LossScale` of the next step; None where modules do not compute in float16.
    options:     of the optimizer's groups and the weights in them, as a loop of one's own has set them; () otherwise.

    Example:
        >>> from dataclasses import replace
        >>> start = Progress(step=0, position=0, num_bad=0, seed=0, dataset="3f2a")
        >>> later = replace(start, step=10, position=10 * 32)  # after ten steps of 32 examples
        >>> later.position, later.group, later.mixture, later.beside
        (320, None, (), None)
    """

    step: int
    position: int
    num_bad: int
    seed: int
    dataset: str
    num_skipped: int = 0
    group: Mapping[str, int] | None = None
    mixture: tuple[int, ...] = ()
    start: str = ""
    beside: Mapping[str, str] | None = None
    scales: Mapping[str, float] | None = None
    loss_scale: float | None = None
    num_finite: int = 0
    shuffle: bool | None = None
    optimizer: str = ""
    options: tuple[tuple[dict[str, float | tuple[float, ...]], tuple[str, ...]], ...] = ()
    stated: Mapping[str, str] | None = None
    own_files: Mapping[str, str] | None = None


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunState(_Stored):
    """`state.json`: a run's Progress, and who wrote it.

    launch: as in `World`. written: when saving began.
    """

    step: int = Field(ge=0, lt=2**53)
    num_skipped: int = Field(ge=0, lt=2**53)
    position: int = Field(ge=0, lt=2**53)
    num_bad: int = Field(ge=0, lt=2**53)
    seed: int
    dataset: str
    group: dict[str, int] | None = None
    mixture: tuple[int, ...] = ()
    start: str = ""
    beside: dict[str, str] | None = None
    scales: dict[str, float] | None = None
    loss_scale: float | None = Field(None, ge=1, le=2.0**32)
    num_finite: int = Field(0, ge=0, lt=2**53)
    shuffle: bool | None = None
    optimizer: str = ""
    options: tuple[tuple[dict[str, float | tuple[float, ...]], tuple[str, ...]], ...] = ()
    stated: dict[str, str] | None = None
    own_files: dict[str, str] | None = None
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
        """The Progress that was saved."""
        return Progress(**self.model_dump(include={field.name for field in dataclasses.fields(Progress)}))


class File(_Stored):
    """A file's entry in the manifest."""

    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class CheckpointManifest(_Stored):
    """`manifest.json` without its own checksum. motet: the version that wrote it. files: name -> File."""

    format: int
    motet: str
    files: dict[str, File]


class Shard(_Stored):
    """The part of a tensor with its first element at `offsets`, and `shape`; `file` has it by `key`, or by the tensor's
    name."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    key: str = ""


class StoredTensor(_Stored):
    """One tensor of a checkpoint. dtype: torch's name, such as float32. shape: of the whole tensor."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


_TENSORS = TypeAdapter(dict[str, StoredTensor])

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of a run."""


def name_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_named(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name; None if the folder has another name."""
    named = _NAME.fullmatch(checkpoint.name)
    return int(named[1]) if named else None


def is_checkpoint(folder: Path) -> bool:
    """Whether any version of Motet has written this folder as a checkpoint, whole or not."""
    return any((folder / name).is_file() for name in (MANIFEST, STATE))


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint. Raises Damaged, and UserError for a format that this version cannot read."""
    path = checkpoint / MANIFEST
    with _judged(path):
        if not checkpoint.is_dir():
            raise Damaged("there is no such folder")
        if not path.exists() and (checkpoint / _EARLIER).exists():
            raise UserError(
                f"{checkpoint} was written by an earlier version of Motet as a pickle, which can run code when it is "
                "opened and so is not: go on with that version, or start anew with --resume never."
            )
        return parse_manifest(_read(path), str(checkpoint))


def parse_manifest(text: bytes, where: str) -> CheckpointManifest:
    """The manifest of the checkpoint `where` from its bytes. Raises as `read_manifest`, and as JSON and pydantic do."""
    body = dict(json.loads(text))
    if body.pop("sha256", None) != _sha256_of(body):
        raise Damaged(f"{MANIFEST} is not as it was written, by its own checksum")
    if body.get("format") != FORMAT:
        raise UserError(
            f"{where} was written by Motet {body.get('motet')} in the format {body.get('format')}, and Motet "
            f"{motet.__version__} reads the format {FORMAT}: update Motet."
        )
    manifest = CheckpointManifest.model_validate(body)
    if absent := [name for name in (STATE, TENSORS) if name not in manifest.files]:
        raise Damaged(f"{MANIFEST} does not name {absent[0]}")
    if outside := [name for name in manifest.files if Path(name).name != name]:
        raise Damaged(f"{MANIFEST} names {outside[0]!r}, which is not beside it")
    return manifest


def digest_of(checkpoint: Path) -> str:
    """What tells a whole checkpoint from all others: the SHA-256 of its manifest."""
    with _judged(checkpoint / MANIFEST):
        return sha256(checkpoint / MANIFEST)


def read_state(checkpoint: Path) -> RunState:
    """The state of a checkpoint.

    Raises Damaged, also if the folder has the name of another step, and UserError if reading is not permitted.
    """
    with _judged(checkpoint / STATE):
        state = RunState.model_validate_json(_read(checkpoint / STATE))
    if step_named(checkpoint) not in (None, state.step):
        raise Damaged(f"{STATE} is of step {state.step}, and the folder's name is of another")
    return state


def read_tensors(checkpoint: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of a checkpoint. Raises Damaged, and UserError if reading is not permitted."""
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
    """Whether shards lie inside their tensor, start at different offsets, and have as many elements as the tensor."""
    # A tensor with fewer rows than ranks has empty shards, with equal offsets.
    shards = [shard for shard in tensor.shards if math.prod(shard.shape)]
    within = all(
        len(shard.offsets) == len(shard.shape) == len(tensor.shape)
        and all(0 <= at <= at + size <= whole for at, size, whole in zip(shard.offsets, shard.shape, tensor.shape))
        for shard in shards
    )
    size = sum(math.prod(shard.shape) for shard in shards)
    return within and len({shard.offsets for shard in shards}) == len(shards) and size == math.prod(tensor.shape)


def verify(checkpoint: Path, part: int = 0, num_parts: int = 1, show: Callable[[int], None] | None = None) -> RunState:
    """Read and check every byte of a checkpoint, or of part `part` of its files if there are `num_parts` parts.

    show: called with the number of bytes read since its last call.
    Raises Damaged for the first file that is not as it was written. Raises UserError if that cannot be judged: this
    version does not know the format, or reading is not permitted.
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
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it. show: as in `verify`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            digest.update(block[:num_bytes])
            if show is not None:
                show(num_bytes)
    return digest.hexdigest()


def complete_checkpoint(
    folder: Path, files: Mapping[str, File], tensors: Mapping[str, StoredTensor], state: RunState
) -> None:
    """Make a checkpoint of a folder that has the files of all ranks; all of it is on the disk when this returns.

    Raises OSError, also if a file of a rank is missing.
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


def _sha256_of(body: dict[str, Any]) -> str:
    """SHA-256 of a manifest without the key `sha256`."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _size_of(path: Path) -> int:
    """Bytes of a file. Raises Damaged if it is no regular file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path.name} is no file")
    return status.st_size


def _read(path: Path) -> bytes:
    _size_of(path)  # Reading a pipe would block.
    return path.read_bytes()


@contextmanager
def _judged(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as Damaged, or as UserError if they do not show damage."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise Damaged(f"{path.name} is missing") from error
        if error.errno == errno.EIO:
            raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
        # The file itself may be whole: another attempt, or another user, may be able to read it.
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "its content"
        raise Damaged(f"{path.name} is not what Motet writes: {where}: {first['msg']}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{path.name} is not what Motet writes: no JSON object") from error
