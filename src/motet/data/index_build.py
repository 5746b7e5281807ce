"""Opens the index of a manifest, and builds it if no index fits.

An index is a cache. It fits if it is whole and has the current format, if it is of this tokenizer and template and of
the manifest as it is now (size and time of change, or content), and if its bad files are still bad. An index that does
not fit is rebuilt. Of processes that start together the first builds, and the others open its index.

A missing or unreadable file marks its example as bad. A wrong record stops the build, because its meaning is unknown.
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
from motet.core.modalities import own_modalities
from motet.data.copies import Copies
from motet.data.index import FORMAT_VERSION, SCHEMA, DamagedIndex, Index, checksum
from motet.data.index_entries import FATAL_HEADER, EntryReader, HeaderCheck, PackedColumns, TextEncoder, join_columns
from motet.data.index_lock import IndexProgress, build_lock
from motet.data.manifest import Entry, Manifest
from motet.data.media import MediaRef
from motet.data.workers import WorkerDied, WorkerPool

_CHUNK_EXAMPLES = 256
_CHUNK_BYTES = 1 << 25
"""Records with media are large: a chunk ends with the record that passes this."""


def open_index(
    manifest: str | Path | Manifest,
    text: TextEncoder,
    *,
    index_folder: str | Path | None = None,
    copies: Copies | None = None,
    num_workers: int = 0,
    progress: IndexProgress | None = None,
) -> Index:
    """The index of a manifest; it is built first if no index fits.

    index_folder: a folder for indexes, if the manifest's own is not writable.
    copies:       where remote files are copied to; None: there may be none.
    num_workers:  processes that build; 0: this one.
    Raises UserError for a manifest that is missing or wrong (naming the line), or if no index can be written.
    """
    with _reading(manifest):
        manifest = manifest if isinstance(manifest, Manifest) else Manifest.find(manifest, copies)
    folder = manifest.default_index_folder if index_folder is None else manifest.index_folder_in(Path(index_folder))
    path = folder / f"{_name(text)}.arrow"
    if index := _open_if_fits(path, manifest):
        return index
    with _writing(manifest, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with build_lock(path.with_suffix(".lock"), progress) as lock:
            # Another process may have built it while this one waited.
            if index := _open_if_fits(path, manifest):
                return index
            rows_path = _build(manifest, text, path, num_workers, lock.share_progress(progress))
            if lock.is_exclusive:
                _remove_former(rows_path)
    if index := _open_if_fits(path, manifest):
        return index
    raise UserError(
        f"manifest {manifest.name}, a file that it names, or its index changed while it was indexed; start again when "
        "nothing writes to them"
    )


@contextmanager
def _reading(manifest: str | Path | Manifest) -> Iterator[None]:
    """Raise UserError if the manifest cannot be read, or is removed meanwhile."""
    try:
        yield
    except OSError as error:
        name = manifest.name if isinstance(manifest, Manifest) else manifest
        raise UserError(f"manifest {name}: cannot be read ({error.strerror or error})") from error


@contextmanager
def _writing(manifest: Manifest, folder: Path) -> Iterator[None]:
    """Raise UserError if no index can be written to the folder: for its permissions, or because the disk is full."""
    try:
        yield
    except BrokenPipeError:
        # The progress cannot be printed; the folder is not the reason.
        raise
    except OSError as error:
        raise UserError(
            f"the index of {manifest.name} cannot be written to {folder} ({error.strerror}); "
            "name a folder that can be written by index_folder"
        ) from error


def _name(text: TextEncoder) -> str:
    """The name of an index: of the text's encoder, and of modalities of the user's own, in their order."""
    known = "".join(f" {own.name} {own.digest}" for own in own_modalities())
    if not known:
        return text.fingerprint[:16]
    return hashlib.blake2b((text.fingerprint + known).encode(), digest_size=8).hexdigest()


def _open_if_fits(path: Path, manifest: Manifest) -> Index | None:
    with _reading(manifest):
        stamp = manifest.stamp()
    try:
        index = Index(path, manifest.folder, manifest.copies)
    except (OSError, DamagedIndex):
        return None
    return index if _is_current(manifest, stamp, index) and _still_bad(index) else None


def _is_current(manifest: Manifest, stamp: list[list[Any]], index: Index) -> bool:
    """Whether the index was built from the manifest as it is now."""
    if index.about["stamp"] == stamp:
        return True
    if manifest.is_remote:
        return False
    # The manifest may have been copied or touched without a change.
    same_sizes = [entry[:2] for entry in index.about["stamp"]] == [entry[:2] for entry in stamp]
    with _reading(manifest):
        return manifest.kind != "tar" and same_sizes and index.about["digest"] == manifest.digest()


def _still_bad(index: Index) -> bool:
    """Whether the files that were bad when the index was built are still bad: a user may have repaired them."""
    bad_examples = list(index.bad_examples())
    # A header that kills its reader is read in a worker process.
    any_fatal = any(bad.reason.startswith(FATAL_HEADER) for bad in bad_examples)
    with WorkerPool(int(any_fatal), HeaderCheck, own_modalities()) as pool:
        for bad in bad_examples:
            try:
                refs = [_as_now(ref) for ref in index.media_refs(bad.example)]
                if pool.submit(refs).result() != bad.reason:
                    return False
            except WorkerDied:
                if not bad.reason.startswith(FATAL_HEADER):
                    return False
            except UserError:
                # The row is damaged, so the index must be rebuilt.
                return False
    return True


def _as_now(ref: MediaRef) -> MediaRef:
    """A reference to what its file is now: without the header, or the local copy, that it once had."""
    return replace(ref, raw=None, copies=None if ref.copies is None else ref.copies.of_version(uuid.uuid4().hex))


def _build(manifest: Manifest, text: TextEncoder, path: Path, num_workers: int, progress: IndexProgress) -> Path:
    rows_path = path.with_name(f"{path.stem}-{uuid.uuid4().hex[:12]}.rows")
    manifest = manifest.of_version(rows_path.name)
    with _reading(manifest):
        stamp, digest = manifest.stamp(), manifest.digest()
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
    """Write the lengths to another file and then rename it to `path`. about: the later `Index.about`."""
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
    """Remove the files of former builds. A process that has one open can still read it."""
    stem = rows_path.stem.partition("-")[0]
    for path in (*rows_path.parent.glob(f"{stem}-*.rows"), *rows_path.parent.glob(f"{stem}-*.part")):
        # A file that cannot be removed only takes up space.
        with suppress(OSError):
            if path != rows_path:
                path.unlink()


def _write_rows(
    path: Path, chunks: Iterable[tuple[PackedColumns, float]], progress: IndexProgress
) -> list[PackedColumns]:
    """Write the rows of each chunk, and return the chunks without them."""
    kept, num_examples = [], 0
    with path.open("wb") as rows:
        for chunk, share in chunks:
            rows.write(chunk.rows)
            kept.append(replace(chunk, rows=b""))
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
    """Chunks in the manifest's order, each with the share of the manifest that is done."""
    chunks = _in_chunks(_entries(manifest))
    first = list(islice(chunks, 3))
    # Reading a small manifest takes less time than starting a worker.
    is_small = len(first) < 3 and sum(map(len, first)) < 2 * _CHUNK_EXAMPLES
    num_workers = 0 if is_small else num_workers
    with WorkerPool(num_workers, EntryReader, manifest.folder, text, manifest.copies, own_modalities()) as pool:
        waiting: deque[tuple[Future[PackedColumns], list[Entry]]] = deque()
        for chunk in chain(first, chunks):
            waiting.append((pool.submit((chunk, "")), chunk))
            # Two chunks a worker: enough to keep workers busy, few enough to bound the memory.
            while len(waiting) > 2 * num_workers:
                yield from _read(*waiting.popleft(), pool)
        while waiting:
            yield from _read(*waiting.popleft(), pool)


def _read(
    columns: Future[PackedColumns], entries: list[Entry], pool: WorkerPool
) -> Iterator[tuple[PackedColumns, float]]:
    """The columns of some entries. If they kill a worker they are read one by one, to leave out only the fatal one."""
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
            except WorkerDied as death:
                yield _read_without_headers(entry, death.how, pool), entry.progress


def _read_without_headers(entry: Entry, death: str, pool: WorkerPool) -> PackedColumns:
    """The columns of an entry without its files. Raises UserError if the record kills the worker even so."""
    try:
        return pool.submit(([entry], death)).result()  # type: ignore[no-any-return]
    except WorkerDied as died:
        raise UserError(f"{entry.where}: a worker process {died.how} while it read this record") from None


def _entries(manifest: Manifest) -> Iterator[Entry]:
    with _reading(manifest):
        yield from manifest.entries()


def _in_chunks(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    chunk, num_bytes = list[Entry](), 0
    for entry in entries:
        chunk.append(entry)
        num_bytes += len(entry.text) + sum(len(member.data or b"") for member in entry.members or ())
        if len(chunk) == _CHUNK_EXAMPLES or num_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
