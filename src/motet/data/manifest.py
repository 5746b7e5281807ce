"""Manifests: JSON, JSONL, Parquet, HF datasets and WebDataset tar shards, read as one stream of records.

The name of a manifest is a file (`train.jsonl`, `train.json`, `train.parquet`, `train.tar`; JSONL and tar also as
`.gz`, `.bz2`, `.xz` or `.zst`), a directory of tar shards, a directory that `datasets` saved, or a pattern of files of
one format with `*`, `?`, or braces (`train-{000..127}.tar`). Media paths are relative to the manifest's directory.
All but what `datasets` saved may also be a URL (`remote.py`), and is then read as a local copy.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.core.text_files import parse_json, read_json
from motet.data.compressed import COMPRESSED_ENDINGS, DECOMPRESSION_ERRORS, is_compressed, open_decompressed, open_file
from motet.data.conversation import check_is_object
from motet.data.copies import INDEXES, Copies
from motet.data.media_names import DATA_URL_HEAD
from motet.data.record_fields import TOOLS_FIELD, TURN_FIELDS
from motet.data.remote import LOCAL_URL, find_all, folder_of, is_url, is_web, located, path_of, relative
from motet.data.remote_manifest import RemoteFile, remote_files
from motet.data.shard_names import TAR_ENDINGS
from motet.data.shards import Member, expand_shards, read_shard

_FORMATS = ".json, .jsonl, .parquet or .tar"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_DIGEST_CHUNK_BYTES = 1 << 20
_TABLE_ROWS = 64
"""Rows of a table that are made records at a time; with media each may have megabytes."""
_MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True)
class Entry:
    """One record, not yet parsed.

    where:    file and line (record, row, key), for messages.
    text:     the record as JSON.
    members:  the media of its sample in the tar shard, in order; None outside of shards.
    progress: the share of the manifest up to and with this record, 0 to 1.
    below:    the folder of its file, to which paths are relative, as the manifest's folder has it; "": that itself.
    """

    where: str
    text: bytes
    members: tuple[Member, ...] | None
    progress: float
    below: str = ""


@dataclass(frozen=True)
class Manifest:
    """A manifest that exists.

    files:  the one file, or the shards in order.
    folder: indexed paths are relative to it; a URL if the manifest has one. Where a pattern names folders, too, it is
            the one that they are in.
    copies: where remote files are copied to; None: none are read.
    """

    name: str
    kind: str
    files: tuple[Path | RemoteFile, ...]
    folder: Path | str
    copies: Copies | None = None

    @classmethod
    def find(cls, spec: str | Path, copies: Copies | None = None) -> Manifest:
        """The manifest that `spec` names. Raises UserError if it is missing, out of reach or of no known format."""
        if is_url(spec):
            url = str(spec)
            files = remote_files(url, copies)
            folder = folder_of(url.rstrip("/"))
            while _is_pattern(folder):
                folder = folder_of(folder)
            name = url.rstrip("/").removeprefix(f"{folder}/") if len(files) > 1 else files[0].name
            return cls(re.sub(r"[^\w.-]+", "_", name), _common_kind(files, url), files, folder, copies)
        path = Path(str(spec).removeprefix(LOCAL_URL))
        if path.is_file():
            return cls(path.name, _kind_of(path, spec), (path,), path.parent, copies)
        if (path / _STATE).is_file() or (path / _SPLITS).is_file():
            return cls(path.name, "arrow", _saved_files(path), path.parent, copies)
        shards = expand_shards(path)
        if not shards and path.is_dir():
            raise UserError(f"manifest {spec}: is a folder without tar shards; name its files, as {path}/*.parquet")
        if not shards:
            raise UserError(f"manifest {spec}: there is no such file; it must be a {_FORMATS} file, or tar shards")
        folder = path.parent
        while not path.is_dir() and _is_pattern(str(folder)):
            folder = folder.parent
        name = path.name if path.is_dir() else re.sub(r"[^\w.-]+", "_", str(path.relative_to(folder)))
        return cls(name, _common_kind(shards, spec), tuple(shards), folder, copies)

    @property
    def is_remote(self) -> bool:
        """Whether it has a URL."""
        return isinstance(self.folder, str)

    @property
    def default_index_folder(self) -> Path:
        """The folder of its indexes: beside it, or for a remote one beside the local copies."""
        if isinstance(self.folder, str):
            assert self.copies is not None, "a remote manifest was found with them"
            return self.index_folder_in(Path(self.copies.folder) / INDEXES)
        return self.folder / f"{self.name}.motet-index"

    def index_folder_in(self, folder: Path) -> Path:
        """The folder of its indexes in one that manifests of the same name from several folders share."""
        own = self.folder if isinstance(self.folder, str) else str(self.folder.resolve())
        suffix = hashlib.blake2b(own.encode(), digest_size=6).hexdigest()
        return folder / f"{self.name}-{suffix}.motet-index"

    def of_version(self, version: str) -> Manifest:
        """The same manifest, of which remote files are copied anew for each version."""
        copies = None if self.copies is None else self.copies.of_version(version)
        files = (file.of_version(version) if isinstance(file, RemoteFile) else file for file in self.files)
        return replace(self, files=tuple(files), copies=copies)

    def stamp(self) -> list[list[Any]]:
        """Name, bytes and time of change (ns) of each file: if equal, the manifest has not changed.

        Of a remote file, in place of the time, what its store calls its version.
        """
        with self._reading():
            remote = [file.found.url for file in self.files if isinstance(file, RemoteFile)]
            if remote:
                found = dict(zip(remote, find_all(remote)))
                if gone := [url for url in remote if found[url] is None]:
                    raise FileNotFoundError(f"{gone[0]} is not there any more")
                return [[path_of(at.url).name, at.size_bytes, at.version] for at in found.values() if at is not None]
            local = [file for file in self.files if not isinstance(file, RemoteFile)]
            return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in local]

    def digest(self) -> str:
        """A digest of the content; for shards, which may be terabytes, of their names and sizes."""
        digest = hashlib.blake2b(digest_size=16)
        if self.kind == "tar":
            digest.update(json.dumps([entry[:2] for entry in self.stamp()]).encode())
            return digest.hexdigest()
        with self._reading():
            for path in self.files:
                with open_file(path) as file:
                    for chunk in iter(partial(file.read, _DIGEST_CHUNK_BYTES), b""):
                        digest.update(chunk)
        return digest.hexdigest()

    def entries(self) -> Iterator[Entry]:
        """All records in order. Raises UserError, naming file and position, for an entry that is no record."""
        readers = {"jsonl": _read_jsonl, "json": _read_json, "parquet": _read_table, "arrow": _read_table}
        readers["tar"] = _read_tar
        with self._reading():
            for number, path in enumerate(self.files):
                below = self._below(path)
                for entry in readers[self.kind](path):
                    yield replace(entry, progress=(number + entry.progress) / len(self.files), below=below)

    def _below(self, file: Path | RemoteFile) -> str:
        """As of `Entry`. Paths of what `datasets` saved are relative to the folder around it."""
        own = folder_of(file.found.url) if isinstance(file, RemoteFile) else str(file.parent)
        return "" if self.kind == "arrow" or own == str(self.folder) else relative(own, self.folder)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise UserError for errors of the file system."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"manifest {located(self.folder, self.name)}: cannot be read ({error.strerror or error})"
            ) from None


def _is_pattern(folder: str) -> bool:
    """Whether the path or the URL of a folder stands for several."""
    # In a web address a question mark begins the query.
    return "{" in folder or (not is_web(folder) and glob.has_magic(folder.rpartition("://")[2]))


def _common_kind(files: Sequence[Path | RemoteFile], spec: str | Path) -> str:
    """The format of all files of a manifest. Raises UserError if there are two."""
    kinds = [_kind_of(file, spec) for file in files]
    if other := next((file for file, kind in zip(files, kinds) if kind != kinds[0]), None):
        raise UserError(f"manifest {spec}: names {files[0].name} and {other.name}, which are of two formats")
    return kinds[0]


def _kind_of(path: Path | RemoteFile, spec: str | Path) -> str:
    """The format of a file by its ending. Raises UserError for any other."""
    name = path.name.lower()
    if name.endswith(TAR_ENDINGS):
        return "tar"
    kind = path.suffix.lower().lstrip(".")
    if kind in ("json", "jsonl", "parquet"):
        return kind
    if path.suffix.lower() in COMPRESSED_ENDINGS and path.with_suffix("").suffix.lower() == ".jsonl":
        return "jsonl"
    named = "manifest" if str(path) == str(spec) else f"manifest {spec}:"
    raise UserError(
        f"{named} {path}: its ending '{path.suffix}' is unknown; it must be {_FORMATS}, the lines and the tar perhaps "
        f"with {' or '.join(COMPRESSED_ENDINGS)} behind"
    )


def _saved_files(folder: Path) -> tuple[Path, ...]:
    """The files of a dataset that `datasets` saved, in order. Raises UserError for one that is not there as a whole."""
    if not (folder / _STATE).is_file():
        splits = read_json(folder / _SPLITS, "the list of splits")
        named = splits.get("splits") if isinstance(splits, dict) else None
        first = named[0] if isinstance(named, list) and named else "train"
        raise UserError(
            f"manifest {folder}: holds several splits ({named}); name one of them, as {folder / str(first)}"
        )
    state = read_json(folder / _STATE, "the state of the dataset")
    listed = state.get("_data_files") if isinstance(state, dict) else None
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed or [None]]
    if not isinstance(listed, list) or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise UserError(f"{folder / _STATE}: does not list the files of a dataset; save it anew by save_to_disk")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UserError(f"{folder}: is a selection of rows; save it anew after flatten_indices()")
    files = tuple(folder / str(name) for name in names)
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"manifest {folder}: its file {missing[0].name} is missing")
    return files


def _read_tar(path: Path | RemoteFile) -> Iterator[Entry]:
    for key, text, members in read_shard(path):
        yield Entry(f"{path}, key {key}", text, members, 1.0)


def _read_jsonl(path: Path | RemoteFile) -> Iterator[Entry]:
    size_bytes = path.found.size_bytes if isinstance(path, RemoteFile) else path.stat().st_size
    num_bytes = max(size_bytes, 1)
    done = 0
    try:
        with open_decompressed(path) as file:
            for number, line in enumerate(file, start=1):
                done += len(line)
                text = line.removeprefix(b"\xef\xbb\xbf").strip()
                if text:
                    yield Entry(f"{path}, line {number}", text, None, min(done / num_bytes, 1.0))
    except DECOMPRESSION_ERRORS as error:
        if not is_compressed(path):
            raise
        raise UserError(f"{path}: is damaged or cut off, and cannot be decompressed ({error})") from None


def _read_json(path: Path | RemoteFile) -> Iterator[Entry]:
    try:
        if isinstance(path, RemoteFile):
            with path.open_copy() as file:
                records = parse_json(file.read(), str(path))
        else:
            records = read_json(path, "the manifest")
    except UserError:
        if _holds_lines(path):
            raise UserError(f"{path}: holds a record a line; give its name the ending .jsonl") from None
        raise
    if not isinstance(records, list):
        raise UserError(f"{path}: must hold a list of records; one record a line is a .jsonl file")
    for number, record in enumerate(records, start=1):
        where = f"{path}, record {number}"
        text = json.dumps(check_is_object(record, where), ensure_ascii=False)
        yield Entry(where, text.encode(), None, number / len(records))


def _holds_lines(path: Path | RemoteFile) -> bool:
    """Whether a file that is no JSON has a record a line, as its first lines have it."""
    with suppress(OSError, ValueError, RecursionError), open_file(path) as file:
        first = [json.loads(line) for line in islice(file, 2)]
        return len(first) > 1 and all(isinstance(record, dict) for record in first)
    return False


def _read_table(path: Path | RemoteFile) -> Iterator[Entry]:
    number = 0
    for records, num_rows in (_arrow_batches if path.suffix == ".arrow" else _parquet_batches)(path):
        for record in records:
            number += 1
            where = f"{path}, row {number}"
            yield Entry(where, _dump(record), None, number / num_rows)


def _arrow_batches(path: Path | RemoteFile) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """As `_parquet_batches`, of a file that `datasets` saved: an Arrow stream."""
    import pyarrow

    num_read = 0
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            table = stream.read_all()
            _check_names(table.schema, path)
            for batch in table.to_batches(max_chunksize=_TABLE_ROWS):
                yield batch.to_pylist(), table.num_rows
                num_read += batch.num_rows
    except UserError:
        raise
    except Exception as error:
        raise UserError(_unreadable(path, num_read, "Arrow stream", error)) from None


def _parquet_batches(path: Path | RemoteFile) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Batches of rows, each with the number of rows in the whole file."""
    import pyarrow.parquet

    num_read = 0
    try:
        with open_file(path) as opened, pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True) as file:
            _check_names(file.schema_arrow, path)
            for batch in file.iter_batches(batch_size=_TABLE_ROWS):
                yield batch.to_pylist(), file.metadata.num_rows
                num_read += batch.num_rows
    except UserError:
        raise
    # A damaged page, a type without a Python value, a text that is not UTF-8: pyarrow raises exceptions of any kind.
    except Exception as error:
        raise UserError(_unreadable(path, num_read, "Parquet file", error)) from None


def _check_names(schema: Any, path: Path | RemoteFile) -> None:
    if repeated := [name for name in schema.names if schema.names.count(name) > 1]:
        raise UserError(f"{path}: has two columns '{repeated[0]}'; each must have a name of its own")


def _unreadable(path: Path | RemoteFile, num_read: int, what: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]
    after = f", after row {num_read}" if num_read else ""
    return f"{path}{after}: is no {what} that can be read ({reason})"


def _dump(record: dict[str, Any]) -> bytes:
    """A row as JSON: bytes become data URLs, as a record holds them, and nulls in turns and tools are left out.

    In a table each object has the keys of all; a call of a tool would get arguments that others have.
    """
    record = record | {name: _without_nulls(record[name]) for name in (*TURN_FIELDS, TOOLS_FIELD) if name in record}

    def as_text(value: object) -> str:
        return DATA_URL_HEAD + base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)

    text = json.dumps(record, ensure_ascii=False, default=as_text)
    # pandas writes a missing number as NaN.
    text = json.dumps(_without_nan(record), ensure_ascii=False, default=as_text) if "NaN" in text else text
    return text.encode()


def _without_nulls(value: Any) -> Any:
    """The value without the keys of objects that have null; entries of lists stay, as they have a place."""
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list | tuple) else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
