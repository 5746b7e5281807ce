"""A run's folder: checks that Motet can write its files there, and locks it against other runs."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

from motet.core.errors import UserError
from motet.core.files import names_open_file
from motet.data.shard_names import expand_braces
from motet.train.checkpoint.contents import CHECKPOINTS
from motet.train.report.step_lines import ASIDE, METRICS, step_of

LOCK, REPORT = "run.lock", "report.html"
FILES = (
    LOCK,
    "recipe.toml",
    "metrics.jsonl",
    "bad_steps.jsonl",
    "heldout.jsonl",
    ASIDE,
    "answers.json",
    "made.json",
    "last_step.json",
    "trace.json",
    "timeline.html",
    "timeline.json",
    "summary.json",
    REPORT,
)
FOLDERS = (CHECKPOINTS, "tensorboard", "export", "made", "profile")
_RANK = re.compile(r"\{rank[^{}]*\}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error codes of a file system without locks."""


@dataclass(frozen=True)
class RunFolder:
    """The locked folder of a run. descriptor: of its lock file."""

    path: Path
    descriptor: int

    @property
    def loss(self) -> str:
        """How this run has lost its folder, a sentence without full stop; "" while it has it.

        Files that are open can be written all the same, and new ones would be in the folder of another run.
        """
        try:
            if names_open_file(self.path / LOCK, self.descriptor):
                return ""
        except OSError:  # Of a disk that does not answer, as writing will say.
            return ""
        return f"run.dir = {self.path}, or {LOCK} in it, was removed or moved away while the run went on"


@contextmanager
def locked_run_folder(folder: Path, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """Make the folder of a run and lock it while the block runs; for one rank of the run.

    The lock is the kernel's (flock). It ends with the process, however that ends, and holds between machines if the
    file system supports that (NFS from version 4, Lustre mounted with flock).
    say: called with a sentence if the file system has no locks.
    Raises UserError if the folder cannot be written, if a path that the run writes to is taken by something else, or if
    another run holds the lock.
    """
    with writing(folder, "run.dir"):
        folder.mkdir(parents=True, exist_ok=True)
    _check(folder)
    with writing(folder / LOCK, "run.dir"):
        # O_CLOEXEC: processes that this one starts must not keep the lock, as they may outlive it.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(folder, descriptor, say)
        yield RunFolder(folder, descriptor)
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """Raise an OSError of the block as a UserError that names the path. what: the recipe's key with this path."""
    try:
        yield
    except OSError as error:
        key = f"{what} = " if what else ""
        raise UserError(f"{key}{error.filename or path} cannot be written: {error.strerror or error}.") from error


def outputs_named(folder: Path, manifest: str) -> str:
    """The name of a file that a run writes in its folder and that a manifest names, too; "" if there is none.

    folder, manifest: absolute; the latter may be a pattern, with {rank} for a number.
    Raises UserError for braces that name too many files.
    """
    names = (*FILES, *FOLDERS)
    for pattern in set(expand_braces(_RANK.sub("0", manifest))):
        path = PurePath(pattern)
        named = names if glob.has_magic(pattern) else [path.name] if path.name in names else []
        if found := next((name for name in named if (folder / name).match(pattern)), ""):
            return found
    return ""


def _check(folder: Path) -> None:
    """Raise UserError for a path that the run will write to and cannot, or that belongs to no run of Motet."""
    is_of_a_run = (folder / LOCK).exists() or _has_metrics(folder / "metrics.jsonl")
    for name in (*FILES, *FOLDERS):
        path, is_folder = folder / name, name in FOLDERS
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"run.dir: {path} cannot be used: {error.strerror}; move it away.") from error
        if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
            kind = "folder" if is_folder else "ordinary file"
            raise UserError(f"run.dir: {path} is no {kind}, and training writes one there; move it away.")
        if not is_of_a_run:
            raise UserError(
                f"run.dir: training writes {path}, which is there and of no run of Motet; move it away, or set another "
                "run.dir."
            )
        if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if is_folder else 0)):
            raise UserError(f"run.dir: {path} may not be read and written by this user; change its permissions.")


def _has_metrics(path: Path) -> bool:
    """Whether this is a run's metrics.jsonl: the mark of a run from before Motet wrote a lock file."""
    if not path.is_file():
        return False
    with writing(path), open(path, "rb") as file:
        return step_of(file.readline(), METRICS) is not None


def _lock(folder: Path, descriptor: int, say: Callable[[str], None]) -> None:
    """Lock the run's lock file and write this process into it. Raises UserError if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
        raise UserError(
            f"run.dir = {folder} is in use by {owner}: wait for it, stop it, or set another run.dir."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise UserError(f"run.dir = {folder} cannot be locked: {error.strerror}.") from error
        say(f"The file system of {folder} has no locks, so nothing keeps a second run out of it.")
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {since} ({' '.join(sys.argv)[:500]})\n"
    with writing(folder / LOCK, "run.dir"):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
