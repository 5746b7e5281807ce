"""Opening the index of a manifest, and building it where there is none that fits.

An index fits if it is whole, of this manifest as it is now (size and time of change, or content), of this tokenizer and
template, and of this format, and if the files that were bad are so still. It is a cache: one that does not fit, or was
damaged, is built anew. Processes that start together build one after the other, and all but the first find the
index there. Files that are missing or unreadable mark their example as bad and do not stop the build; a wrong record
does, because nobody can tell what was meant by it.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from motet.core.errors import UserError
from motet.data.index import FORMAT_VERSION, SCHEMA, DamagedIndex, Index, checksum
from motet.data.index_entries import DEADLY, EntryReader, HeaderCheck, PackedColumns, TextEncoder, join_columns
from motet.data.index_lock import IndexProgress, build_lock
from motet.data.manifest import Entry, Manifest
from motet.data.workers import WorkerDied, WorkerPool

_CHUNK_EXAMPLES = 256


def open_index(
    manifest: str | Path | Manifest,
    text: TextEncoder,
    *,
    index_folder: str | Path | None = None,
    num_workers: int = 0,
    progress: IndexProgress | None = None,
) -> Index:
    """The index of a manifest, built first if there is none that fits.

    index_folder: a folder for indexes, if the manifest's own is not writable. num_workers: processes that build.
    Raises UserError for a manifest that is missing or wrong (naming the line), or if no index can be written.
    """
    with _reading(manifest):
        manifest = manifest if isinstance(manifest, Manifest) else Manifest.find(manifest)
    folder = _index_folder(manifest, index_folder)
    path = folder / f"{text.fingerprint[:16]}.arrow"
    if index := _open_if_fits(path, manifest):
        return index
    with _writing(manifest, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with build_lock(path.with_suffix(".lock"), progress) as lock:
            # Another process may have built it while this one waited.
            if index := _open_if_fits(path, manifest):
                return index
            rows_path = _build(manifest, text, path, num_workers, lock.telling(progress))
            if lock.alone:
                _remove_former(rows_path)
    if index := _open_if_fits(path, manifest):
        return index
    raise UserError(
        f"manifest {manifest.name}, a file that it names, or its index changed while it was indexed; start again when "
        "nothing writes to them"
    )


@contextmanager
def _reading(manifest: str | Path | Manifest) -> Iterator[None]:
    """A manifest that cannot be read, or vanishes meanwhile, is a UserError."""
    try:
        yield
    except OSError as error:
        name = manifest.name if isinstance(manifest, Manifest) else manifest
        raise UserError(f"manifest {name}: cannot be read ({error.strerror})") from error


@contextmanager
def _writing(manifest: Manifest, folder: Path) -> Iterator[None]:
    """A folder in which no index can be written, for its permissions or because the disk is full, is a UserError."""
    try:
        yield
    except BrokenPipeError:
        # Nobody reads what is said of the progress; the folder has nothing to do with it.
        raise
    except OSError as error:
        raise UserError(
            f"the index of {manifest.name} cannot be written to {folder} ({error.strerror}); "
            "name a folder that can be written by index_folder"
        ) from error


def _index_folder(manifest: Manifest, given: str | Path | None) -> Path:
    if given is None:
        return manifest.default_index_folder
    # Manifests of one name from several places share the folder.
    place = hashlib.blake2b(str(manifest.folder.resolve()).encode(), digest_size=6).hexdigest()
    return Path(given) / f"{manifest.name}-{place}.motet-index"


def _open_if_fits(path: Path, manifest: Manifest) -> Index | None:
    with _reading(manifest):
        stamp = manifest.stamp()
    try:
        index = Index(path, manifest.folder)
    except (OSError, DamagedIndex):
        return None
    return index if _is_of(manifest, stamp, index) and _still_bad(index) else None


def _is_of(manifest: Manifest, stamp: list[list[Any]], index: Index) -> bool:
    if index.about["stamp"] == stamp:
        return True
    # Copied or touched, perhaps, and not changed.
    same_sizes = [entry[:2] for entry in index.about["stamp"]] == [entry[:2] for entry in stamp]
    with _reading(manifest):
        return manifest.kind != "tar" and same_sizes and index.about["digest"] == manifest.digest()


def _still_bad(index: Index) -> bool:
    """Whether the examples whose files were bad when the index was built are so today: files can be mended."""
    found = list(index.bad_examples())
    is_deadly = any(bad.reason.startswith(DEADLY) for bad in found)
    with WorkerPool(int(is_deadly), HeaderCheck) as pool:
        for bad in found:
            try:
                refs = [replace(ref, raw=None) for ref in index.media_refs(bad.example)]
                if pool.submit(refs).result() != bad.reason:
                    return False
            except WorkerDied:
                if not bad.reason.startswith(DEADLY):
                    return False
            except UserError:
                # Its row is damaged, so that the index must be built anew all the same.
                return False
    return True


def _build(manifest: Manifest, text: TextEncoder, path: Path, num_workers: int, progress: IndexProgress) -> Path:
    with _reading(manifest):
        stamp, digest = manifest.stamp(), manifest.digest()
    rows_path = path.with_name(f"{path.stem}-{uuid.uuid4().hex[:12]}.rows")
    try:
        chunks = _write_rows(rows_path, _read_all(manifest, text, num_workers), progress)
        if not chunks:
            raise UserError(f"manifest {manifest.files[0]}: holds no record; it must hold at least one")
        identity = _identity(digest, text.fingerprint, chunks)
        about = {
            "format": FORMAT_VERSION,
            "stamp": stamp,
            "digest": digest,
            "rows": rows_path.name,
            "identity": identity,
        }
        publish_index(path, about, chunks)
    except BaseException:
        rows_path.unlink(missing_ok=True)
        raise
    return rows_path


def publish_index(path: Path, about: dict[str, object], chunks: Sequence[PackedColumns]) -> None:
    """Write the lengths, and only then let them be seen at `path`. about: what `Index.about` will be."""
    columns = join_columns(chunks)
    schema = SCHEMA.with_metadata({"motet": json.dumps(about | {"checksum": checksum(about, columns)})})
    part_path = path.with_name(f"{path.stem}-{uuid.uuid4().hex[:12]}.part")
    try:
        with part_path.open("wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                writer.write_batch(columns.replace_schema_metadata(schema.metadata))
            file.flush()
            os.fsync(file.fileno())
        part_path.replace(path)
    except BaseException:
        part_path.unlink(missing_ok=True)
        raise


def _remove_former(rows_path: Path) -> None:
    """Remove what former builds left. Processes that have it open keep reading it: an open file outlives its name."""
    stem = rows_path.stem.partition("-")[0]
    for path in (*rows_path.parent.glob(f"{stem}-*.rows"), *rows_path.parent.glob(f"{stem}-*.part")):
        # What cannot be removed takes up room, and does no harm.
        with suppress(OSError):
            if path != rows_path:
                path.unlink()


def _write_rows(
    path: Path, chunks: Iterable[tuple[PackedColumns, float]], progress: IndexProgress
) -> list[PackedColumns]:
    """Write the rows out as they come, and keep the lengths."""
    kept, num_examples = [], 0
    with path.open("wb") as rows:
        for chunk, share in chunks:
            rows.write(chunk.rows)
            kept.append(PackedColumns(chunk.examples, chunk.modality, chunk.raw, chunk.bad, b""))
            num_examples += chunk.num_examples
            progress(num_examples, share)
        rows.flush()
        os.fsync(rows.fileno())
    return kept


def _identity(manifest_digest: str, fingerprint: str, chunks: list[PackedColumns]) -> str:
    digest = hashlib.blake2b(f"{FORMAT_VERSION} {manifest_digest} {fingerprint}".encode(), digest_size=16)
    for chunk in chunks:
        for array in (chunk.examples, chunk.modality, chunk.raw):
            digest.update(array.tobytes())
        digest.update(repr([example for example, _, _ in chunk.bad]).encode())
    return digest.hexdigest()


def _read_all(manifest: Manifest, text: TextEncoder, num_workers: int) -> Iterator[tuple[PackedColumns, float]]:
    """Chunks in order of the manifest, each with the share of it that is done."""
    entries = _entries(manifest)
    first = list(islice(entries, 2 * _CHUNK_EXAMPLES))
    # A small manifest is read sooner than a worker has started.
    num_workers = num_workers if len(first) == 2 * _CHUNK_EXAMPLES else 0
    with WorkerPool(num_workers, EntryReader, manifest.folder, text) as pool:
        waiting: deque[tuple[Future[PackedColumns], list[Entry]]] = deque()
        for chunk in _in_chunks(chain(first, entries)):
            waiting.append((pool.submit((chunk, "")), chunk))
            # Enough to keep the workers busy, and few enough to keep the memory small.
            while len(waiting) > 2 * num_workers:
                yield from _read(*waiting.popleft(), pool)
        while waiting:
            yield from _read(*waiting.popleft(), pool)


def _read(
    columns: Future[PackedColumns], entries: list[Entry], pool: WorkerPool
) -> Iterator[tuple[PackedColumns, float]]:
    """What was read of some entries; one by one if that kills a worker, so that the one to blame is left out alone."""
    try:
        yield columns.result(), entries[-1].progress
    except WorkerDied as died:
        if died.is_final:
            raise UserError(
                f"{entries[0].where} to {entries[-1].where}: a worker process {died.how} while it read these, as "
                "others before; is the machine short of memory?"
            ) from None
        for entry in entries:
            try:
                yield pool.submit(([entry], "")).result(), entry.progress
            except WorkerDied as blamed:
                yield _read_without_headers(entry, blamed.how, pool), entry.progress


def _read_without_headers(entry: Entry, death: str, pool: WorkerPool) -> PackedColumns:
    """An entry whose files are left out. Raises UserError if it is not they that are to blame."""
    try:
        return pool.submit(([entry], death)).result()  # type: ignore[no-any-return]
    except WorkerDied as died:
        raise UserError(f"{entry.where}: a worker process {died.how} while it read this record") from None


def _entries(manifest: Manifest) -> Iterator[Entry]:
    with _reading(manifest):
        yield from manifest.entries()


def _in_chunks(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    while chunk := list(islice(entries, _CHUNK_EXAMPLES)):
        yield chunk
