"""A run's folder: that Motet can write all its files there, and that no other run writes there at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from motet.core.errors import UserError
from motet.train.report.step_lines import METRICS, step_of

LOCK = "run.lock"
FILES = (
    LOCK,
    "recipe.toml",
    "metrics.jsonl",
    "bad_steps.jsonl",
    "answers.json",
    "trace.json",
    "timeline.html",
    "summary.json",
    "report.html",
)
FOLDERS = ("checkpoints", "tensorboard", "export")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system answers that has no locks."""


@contextmanager
def claimed(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Make the folder and own it, as long as the block, and this process, lasts; for one rank of a run.

    The lock is the kernel's (flock): it ends with the process, however that ends, and holds between machines where
    the file system passes locks on (NFS from version 4, Lustre mounted with flock). say: is told where there is none.
    Raises UserError for a folder that cannot be written, for what stands in it where a file of the run goes, and is not
    of a run or no file, and where another run owns it, naming that.
    """
    with writing(folder, "run.dir"):
        folder.mkdir(parents=True, exist_ok=True)
    _check(folder)
    with writing(folder / LOCK, "run.dir"):
        # Not inherited by the processes that are started later: they may outlive this one.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(folder, descriptor, say)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """What the system refuses inside is a UserError that names the path. what: the key of the recipe that names it."""
    try:
        yield
    except OSError as error:
        key = f"{what} = " if what else ""
        raise UserError(f"{key}{error.filename or path} cannot be written: {error.strerror or error}.") from error


def _check(folder: Path) -> None:
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
    """Runs before there was a lock are known by them."""
    if not path.is_file():
        return False
    with writing(path), open(path, "rb") as file:
        return step_of(file.readline(), METRICS) is not None


def _lock(folder: Path, descriptor: int, say: Callable[[str], None]) -> None:
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
