"""Manifests: JSON, JSONL, Parquet and WebDataset tar shards, read as one stream of records with their positions.

The name of a manifest is a file (`train.jsonl`, `train.json`, `train.parquet`, `train.tar`), a directory of tar shards,
or a pattern of tar shards with `*`, `?`, or braces (`train-{000..127}.tar`). Media paths are relative to the manifest's
directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.core.text_files import read_json
from motet.data.conversation import check_is_object
from motet.data.shards import Member, expand_shards, read_shard

_FORMATS = ".json, .jsonl, .parquet or .tar"
_DIGEST_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 1024
_MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True)
class Entry:
    """One record, not yet parsed.

    where:    file and line (record, row, key), for messages.
    text:     the record as JSON.
    members:  the media of its sample in the tar shard, in order; None outside of shards.
    progress: the share of the manifest up to and with this record, 0 to 1.
    """

    where: str
    text: bytes
    members: tuple[Member, ...] | None
    progress: float


@dataclass(frozen=True)
class Manifest:
    """A manifest that exists.

    files:  the one file, or the shards in order.
    folder: media paths are relative to it.
    """

    name: str
    kind: str
    files: tuple[Path, ...]
    folder: Path

    @classmethod
    def find(cls, spec: str | Path) -> Manifest:
        """The manifest that `spec` names. Raises UserError if it is missing or of no known format."""
        path = Path(spec)
        if path.is_file():
            kind = path.suffix.lower().lstrip(".")
            if kind not in ("json", "jsonl", "parquet", "tar"):
                raise UserError(f"manifest {spec}: its ending '{path.suffix}' is unknown; it must be {_FORMATS}")
            return cls(path.name, kind, (path,), path.parent)
        shards = expand_shards(spec)
        if not shards:
            raise UserError(f"manifest {spec}: there is no such file; it must be a {_FORMATS} file, or tar shards")
        name = path.name if path.is_dir() else re.sub(r"[^\w.-]+", "_", path.name)
        return cls(name, "tar", tuple(shards), path.parent)

    @property
    def default_index_folder(self) -> Path:
        """The folder of its indexes, beside it."""
        return self.folder / f"{self.name}.motet-index"

    def stamp(self) -> list[list[Any]]:
        """Name, bytes and modification time (ns) of each file: if equal, the manifest has not changed."""
        with self._reading():
            return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in self.files]

    def digest(self) -> str:
        """A digest of the content; for shards, which may be terabytes, of their names and sizes."""
        digest = hashlib.blake2b(digest_size=16)
        if self.kind == "tar":
            digest.update(json.dumps([entry[:2] for entry in self.stamp()]).encode())
            return digest.hexdigest()
        with self._reading(), self.files[0].open("rb") as file:
            for chunk in iter(partial(file.read, _DIGEST_CHUNK_BYTES), b""):
                digest.update(chunk)
        return digest.hexdigest()

    def entries(self) -> Iterator[Entry]:
        """All records in order. Raises UserError, naming file and position, for an entry that is no record."""
        readers = {"jsonl": _read_jsonl, "json": _read_json, "parquet": _read_parquet}
        with self._reading():
            if self.kind != "tar":
                yield from readers[self.kind](self.files[0])
                return
            for number, shard in enumerate(self.files):
                for key, text, members in read_shard(shard):
                    yield Entry(f"{shard}, key {key}", text, members, (number + 1) / len(self.files))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise UserError for errors of the file system."""
        try:
            yield
        except OSError as error:
            raise UserError(f"manifest {self.folder / self.name}: cannot be read ({error.strerror or error})") from None


def _read_jsonl(path: Path) -> Iterator[Entry]:
    num_bytes = max(path.stat().st_size, 1)
    done = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if text:
                yield Entry(f"{path}, line {number}", text, None, done / num_bytes)


def _read_json(path: Path) -> Iterator[Entry]:
    records = read_json(path, "the manifest")
    if not isinstance(records, list):
        raise UserError(f"{path}: must hold a list of records; one record a line is a .jsonl file")
    for number, record in enumerate(records, start=1):
        where = f"{path}, record {number}"
        yield Entry(where, _dump(check_is_object(record, where), where), None, number / len(records))


def _read_parquet(path: Path) -> Iterator[Entry]:
    number = 0
    for records, num_rows in _parquet_batches(path):
        for record in records:
            number += 1
            where = f"{path}, row {number}"
            yield Entry(where, _dump(record, where), None, number / num_rows)


def _parquet_batches(path: Path) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Batches of rows, each with the number of rows in the whole file."""
    import pyarrow.parquet

    num_read = 0
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if repeated := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{path}: has two columns '{repeated[0]}'; each must have a name of its own")
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                yield batch.to_pylist(), file.metadata.num_rows
                num_read += batch.num_rows
    except UserError:
        raise
    # A damaged page, a type without a Python value, a text that is not UTF-8: pyarrow raises exceptions of any kind.
    except Exception as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]
        after = f", after row {num_read}" if num_read else ""
        raise UserError(f"{path}{after}: is no Parquet file that can be read ({reason})") from None


def _dump(record: dict[str, Any], where: str) -> bytes:
    def as_text(value: object) -> str:
        if isinstance(value, bytes):
            raise UserError(
                f"{where}: holds bytes, but media must be named by path; write them to files, or use tar shards"
            )
        return str(value)

    text = json.dumps(record, ensure_ascii=False, default=as_text)
    # pandas writes a missing number as NaN.
    text = json.dumps(_without_nan(record), ensure_ascii=False, default=as_text) if "NaN" in text else text
    return text.encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
