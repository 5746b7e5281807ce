"""Checkpoints copied to a URL, and fetched from it: what a run on another machine goes on from.

    URL/latest.json       names of the checkpoints that led to the newest one, the earliest first; written last
    URL/step-N/...        the files of a checkpoint; manifest.json last, so a folder without it is not whole

A store cannot rename, so `latest.json` says which checkpoints count: one write puts a new one in place of a former.
Bytes are verified where they were fetched to, like those of any checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import UserError
from motet.core.files import sync
from motet.data.remote import (
    LOCAL_URL,
    check_protocol,
    copy_to,
    find,
    is_url,
    put_file,
    read_bytes,
    remove_files,
    remove_folder,
    write_bytes,
)
from motet.train.checkpoint.contents import (
    MANIFEST,
    Damaged,
    parse_manifest,
    read_manifest,
    step_named,
)
from motet.train.checkpoint.folder import checkpoints, checkpoints_set_aside, set_aside

_LATEST = "latest.json"
_AT_ONCE = 8


class NotWhole(UserError):
    """What stands at the URL of a checkpoint is none, or lacks files."""


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The checkpoints of one run at a URL. Called on the first rank alone."""

    url: str

    def line(self) -> list[str]:
        """The names of those that led to the newest one; [] if there are none. Raises UserError."""
        try:
            named = json.loads(read_bytes(f"{self.url}/{_LATEST}"))["line"]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise UserError(f"{self.url}/{_LATEST} cannot be read: no permission") from error
        except (ValueError, KeyError, TypeError):
            named = None
        if not isinstance(named, list) or not all(step_named(Path(str(name))) is not None for name in named):
            raise UserError(f"{self.url}/{_LATEST} is not what Motet writes: give each run a URL of its own")
        return [str(name) for name in named]

    def save(self, checkpoint: Path, line: Sequence[str], keep: int) -> None:
        """Copy a whole checkpoint, then make it the newest, and keep the last `keep` that led to it.

        line: names of those in the run's folder that led to it, this one included. There may be earlier ones here: a
              run on another machine has fetched the newest alone. Raises UserError.
        """
        before = self.line()
        first = next((before.index(name) for name in line if name in before), 0)
        led = [name for name in line if name in before and name != checkpoint.name]
        led = [*before[:first], *led] if led else []
        there = f"{self.url}/{checkpoint.name}"
        if checkpoint.name in before and led:
            # Of a line that the run has left. Until the new one is whole, others go on from those that led to it.
            write_bytes(f"{self.url}/{_LATEST}", json.dumps({"line": led}).encode())
        # Another run of this URL may have left one of the same step: half of each would be none.
        remove_files([f"{there}/{MANIFEST}"])
        names = sorted(read_manifest(checkpoint).files)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda name: put_file(checkpoint / name, f"{there}/{name}"), names))
        put_file(checkpoint / MANIFEST, f"{there}/{MANIFEST}")
        kept = [*led, checkpoint.name][-keep:]
        write_bytes(f"{self.url}/{_LATEST}", json.dumps({"line": kept}).encode())
        for name in before:
            if name not in kept and (step_named(Path(name)) or 0) < (step_named(checkpoint) or 0):
                self._remove(name)

    def add(self, checkpoint: Path, line: Sequence[str], keep: int) -> None:
        """As `save`, if it is newer than those that are there: what an earlier attempt could not copy."""
        newest = max((step_named(Path(name)) or 0 for name in self.line()), default=-1)
        if (step_named(checkpoint) or 0) > newest:
            self.save(checkpoint, line, keep)

    def remove_all(self) -> None:
        """Remove the checkpoints of a run that starts anew, so that none goes on from them. Raises UserError."""
        if names := self.line():
            remove_files([f"{self.url}/{_LATEST}"])
            for name in names:
                self._remove(name)

    def fetch(self, name: str, folder: Path) -> Path:
        """A checkpoint in a run's folder; it is downloaded unless the very same is there.

        Raises NotWhole, and UserError if it cannot be read or written.
        """
        there, path = f"{self.url}/{name}", folder / name
        try:
            text = read_bytes(f"{there}/{MANIFEST}")
        except PermissionError as error:
            raise UserError(f"{there}/{MANIFEST} cannot be read: no permission") from error
        except OSError:
            raise NotWhole(f"{there} is no complete Motet checkpoint: {MANIFEST} is missing") from None
        files = _files(text, there)
        temporary = path.with_name(f"{name}.tmp")
        try:
            if (path / MANIFEST).is_file() and (path / MANIFEST).read_bytes() == text:
                return path
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda each: _download(f"{there}/{each}", temporary / each), files))
            (temporary / MANIFEST).write_bytes(text)
            sync(temporary / MANIFEST)
            sync(temporary)
            if path.is_dir():
                set_aside(path, "superseded")  # Only now: a store that is gone meanwhile costs nothing.
            temporary.rename(path)
            sync(folder)
        except OSError as error:
            raise UserError(f"{there} cannot be copied to {folder}: {error.strerror or error}") from error
        return path

    def newer_than(self, folder: Path) -> str | None:
        """The newest one, if a run's folder has none as new, and did not set it aside. Raises UserError."""
        newest = next(reversed(self.line()), None)
        if newest is None:
            return None
        own = max((step_named(path) or 0 for path in checkpoints(folder)), default=-1)
        is_aside = any(path.name.startswith(f"{newest}.") for path in checkpoints_set_aside(folder))
        return newest if (step_named(Path(newest)) or 0) > own and not is_aside else None

    def _remove(self, name: str) -> None:
        there = f"{self.url}/{name}"
        try:
            files = _files(read_bytes(f"{there}/{MANIFEST}"), there)
        except FileNotFoundError:
            return
        # Without its manifest it is no checkpoint, whatever of it is left.
        remove_files([f"{there}/{MANIFEST}"])
        remove_files([f"{there}/{each}" for each in files])
        remove_folder(there)


def is_stored(name: object) -> bool:
    """Whether a name is the URL of what is copied here before it is read: all but paths of this machine."""
    return is_url(name) or str(name).startswith(LOCAL_URL)


def check_url(url: str) -> None:
    """Raise UserError for the URL of a checkpoint whose protocol is not read."""
    if not url.startswith(LOCAL_URL):
        check_protocol(url, url)


def digest_at(url: str) -> str | None:
    """As `contents.digest_of`, of a checkpoint by its URL; None if there is none any more. Raises UserError."""
    try:
        return hashlib.sha256(read_bytes(f"{url.rstrip('/')}/{MANIFEST}")).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{url}/{MANIFEST} cannot be read ({error.strerror or error})") from error


def checkpoint_at(url: str) -> tuple[RemoteCheckpoints, str]:
    """The run and the name of a checkpoint by its URL. Raises UserError if the URL is of something else."""
    check_url(url)
    run, _, name = url.rstrip("/").rpartition("/")
    if step_named(Path(name)) is None:
        raise UserError(f"{url} names no checkpoint: its URL ends with step-N, as in {url.rstrip('/')}/step-00000100")
    return RemoteCheckpoints(run), name


def _files(manifest: bytes, where: str) -> list[str]:
    """The names of the files of a checkpoint, by its manifest. Raises NotWhole, and UserError for a later format."""
    try:
        return sorted(parse_manifest(manifest, where).files)
    except (Damaged, ValueError, TypeError) as error:
        why = error if isinstance(error, Damaged) else f"{MANIFEST} is not what Motet writes"
        raise NotWhole(f"{where} is no complete Motet checkpoint: {why}") from None


def _download(url: str, path: Path) -> None:
    found = find(url)
    if found is None:
        raise NotWhole(f"{url} is missing, so the checkpoint is not whole")
    with path.open("wb") as file:
        copy_to(found, file)
    sync(path)
