"""Local copies of remote files: one bounded folder for all processes of a machine, the least recently used go first.

    KK/KEY         a copy, whole; KEY is a digest of URL, part and version, KK its first characters
    KK/KEY.part    a copy that a process writes, which holds a lock on it; without a lock it is of one that died
    lock           a lock, and the bytes that all copies take, by the last count

A copy gets its name when all of it is on the disk. A process has a copy open before another can remove it, so nobody
loses what it reads. Room is made before bytes are written, so the folder never holds more than its bound.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from motet.core.errors import UserError
from motet.core.files import FileSlice, names_open_file
from motet.data.remote import Found, copy_to, read_bytes

INDEXES = "indexes"
"""Where, in the folder of copies, indexes of remote manifests are."""
_LOCK, _PART = "lock", ".part"
_COUNT = struct.Struct("<q")
_KEPT_SHARE = 0.9
"""What is left of the bound when room is made, so that it is not made for every file."""
_ROOM_LIMIT_S, _LOOK_EVERY_S = 300.0, 0.05


@dataclass(frozen=True)
class Copies:
    """A folder of copies; plain data, which goes with a `MediaRef` to other processes and nodes.

    folder:    of this machine; it is made when it is needed.
    max_bytes: the most that copies take; indexes in the folder do not count.
    version:   of the manifest whose media are copied: another version has copies of its own.
    """

    folder: str
    max_bytes: int
    version: str = ""

    def of_version(self, version: str) -> Copies:
        """The same folder, for another version."""
        return replace(self, version=version)

    def open(self, url: str, offset: int = 0, num_bytes: int = -1) -> IO[bytes]:
        """A file, or a part of it, from a copy that is made if there is none. num_bytes: -1: to its end.

        Raises OSError for a file that is not there or may not be read, and UserError for all that is no fault of the
        file: a store that is out of reach, a folder that cannot be written, a bound that is too small.
        """
        if num_bytes < 0:
            return self._open(self._key(url), None, url, lambda: read_bytes(url))
        if not num_bytes:
            return io.BytesIO()
        # An index is built from whole shards, and training reads parts.
        with self._writing():
            whole = self._existing(self._key(url))
        if whole is not None:
            return io.BufferedReader(FileSlice(whole, offset, num_bytes))
        key = self._key(f"{url} {offset} {num_bytes}")
        return self._open(key, num_bytes, url, lambda: read_bytes(url, offset, num_bytes))

    def open_whole(self, found: Found) -> IO[bytes]:
        """A file of any size, such as a shard. Raises as `open`."""
        return self._open(self._key(found.url), found.size_bytes, found.url, lambda: found)

    def used_bytes(self) -> int:
        """What copies take now, counted; for tests and messages."""
        with self._counting():
            return sum(size for _, size, _ in self._all())

    def _open(self, key: str, size: int | None, url: str, source: Callable[[], bytes | Found]) -> IO[bytes]:
        """The copy with a key; it is made of what `source` gives. size: in bytes, if known."""
        if size is not None:
            self._check_fits(size, url)
        with self._writing():
            there = self._existing(key)
        if there is not None:
            return there
        with self._part(key) as part:
            # Another process may have made it meanwhile.
            with self._writing():
                there = self._existing(key)
            if there is not None:
                return there
            given = source()
            self._make_room(given.size_bytes if isinstance(given, Found) else len(given), url, part)
            if isinstance(given, Found):
                copy_to(given, part)
            with self._writing():
                if not isinstance(given, Found):
                    part.write(given)
                part.flush()
                os.fsync(part.fileno())
                name = self._path(key)
                opened = open(f"{name}{_PART}", "rb")  # noqa: SIM115  The caller closes it.
                # A file that changes its name while another process counts would be counted twice, or not at all.
                with self._counting():
                    os.rename(f"{name}{_PART}", name)
            return opened

    def _key(self, name: str) -> str:
        return hashlib.blake2b(f"{self.version} {name}".encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()

    def _path(self, key: str) -> Path:
        return Path(self.folder) / key[:2] / key

    def _existing(self, key: str) -> IO[bytes] | None:
        """A copy, marked as used now; None if there is none."""
        try:
            file = open(self._path(key), "rb")  # noqa: SIM115  The caller closes it.
        except FileNotFoundError:
            return None
        os.utime(file.fileno())
        return file

    @contextmanager
    def _part(self, key: str) -> Iterator[IO[bytes]]:
        """The file in which this process alone writes a copy; it is gone afterwards, unless it has its name."""
        path = Path(f"{self._path(key)}{_PART}")
        while True:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
                _lock(file)
                # Who had the lock before may have given the file its name, or removed it.
                if names_open_file(path, file.fileno()):
                    break
            file.close()
        try:
            yield file
        finally:
            with suppress(OSError):
                if names_open_file(path, file.fileno()):
                    path.unlink()
            file.close()

    def _check_fits(self, size: int, url: str) -> None:
        if size > self.max_bytes:
            raise UserError(
                f"{url} has {size:,} bytes, and data.cache_bytes = {self.max_bytes:,} is less than one file; raise it"
            )

    def _make_room(self, size: int, url: str, part: IO[bytes]) -> None:
        """Take room for a copy, which `part` then has; wait for it while other processes write theirs."""
        self._check_fits(size, url)
        deadline = time.monotonic() + _ROOM_LIMIT_S
        while True:
            with self._writing(), self._counting() as file:
                written = os.pread(file.fileno(), _COUNT.size, 0)
                used = _COUNT.unpack(written)[0] if len(written) == _COUNT.size else self.max_bytes
                if used + size > self.max_bytes:
                    used = self._remove_old(size)
                if used + size <= self.max_bytes:
                    os.truncate(part.fileno(), size)
                    # Append mode would ignore the place.
                    os.ftruncate(file.fileno(), 0)
                    file.write(_COUNT.pack(used + size))
                    return
            if time.monotonic() > deadline:
                raise UserError(
                    f"data.cache_bytes = {self.max_bytes:,} is less than the files that processes of this machine copy "
                    "at once; raise it"
                )
            time.sleep(_LOOK_EVERY_S)

    @contextmanager
    def _counting(self) -> Iterator[IO[bytes]]:
        """The lock, held: meanwhile no other process takes room, removes a copy, or gives one its name."""
        with open(Path(self.folder) / _LOCK, "a+b") as file:
            _lock(file)
            yield file

    def _remove_old(self, size: int) -> int:
        """Remove copies, those first that were used longest ago, until `size` fits; returns what the others take."""
        there = sorted(self._all())
        used = sum(each for _, each, _ in there)
        for _, each, path in there:
            if used + size <= max(_KEPT_SHARE * self.max_bytes, size):
                break
            if _removed(path):
                used -= each
        return used

    def _all(self) -> list[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each copy, also of those that are written."""
        found = []
        for path in Path(self.folder).glob("[0-9a-f][0-9a-f]/*"):
            with suppress(FileNotFoundError):
                about = path.stat()
                found.append((about.st_mtime_ns, about.st_size, path))
        return found

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise UserError where the folder cannot be read or written."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"data.cache_folder: {self.folder} cannot hold copies ({error.strerror or error}); name a folder of "
                "this machine that can be written, with room"
            ) from error


def _removed(path: Path) -> bool:
    """Remove a copy, unless a process writes it."""
    if path.suffix == _PART:
        try:
            with open(path, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:
            return False
        return True
    path.unlink(missing_ok=True)
    return True


def _lock(file: IO[bytes]) -> None:
    """Wait for the lock of a file. Raises OSError where the file system has none."""
    fcntl.flock(file, fcntl.LOCK_EX)
