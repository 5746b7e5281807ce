"""Runs one command of Motet after another on inputs that are given with their verdicts, and judges how each ended.

A server imports torch and Motet once and forks a child for each case, which starts in a moment. As a program of its own
it is that server: it reads a job a line on stdin, and answers with a line. A case whose process goes past a limit is
killed with all that it started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

LIMIT_S = 20.0
LIMIT_BYTES = 4 * 10**9
WRONG_INPUT = 2
_PR_SET_PDEATHSIG = 1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
IMPORTED = (
    "torch",
    "transformers",
    "motet.cli",
    "motet.analyze",
    "motet.planner.command",
    "motet.planner.strategies",
    "motet.simulate.command",
    "motet.planning.analyze_recipe",
    "motet.train.checkpoint.command",
    "motet.planning.job",
    "motet.planning.measure",
    "motet.profiling.command",
    "motet.train.trainer",
    "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.whisper.modeling_whisper",
)


def nothing(folder: Path) -> None:
    """Make no files."""


Verdict = Literal["refuse", "accept"]
"""What is right: exit code 2 and one sentence, or exit code 0."""


@dataclass(frozen=True)
class Case:
    """One command line, with its files.

    name:      unique and stable: "COMMAND/GROUP/WHAT", e.g. "train/settings/optimizer.lr=nan".
    arguments: after `motet`; "{folder}" in them stands for the case's own folder, in which the command runs, and
               "{shared}" for the job of a few thousand weights that all cases share and none changes (`shared`).
    verdict:   how it is to end.
    prepare:   makes the case's files in its own folder, which is empty.
    says:      a regular expression that the sentence must match, or, of what is accepted, all that is said.
    """

    name: str
    arguments: tuple[str, ...]
    verdict: Verdict
    prepare: Callable[[Path], object] = nothing
    says: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a case ended. code: -n where signal n ended it; wrong: what of it is wrong, by kind; none: all is right."""

    case: Case
    code: int
    seconds: float
    peak_bytes: int
    stdout: str
    stderr: str
    wrong: tuple[str, ...]


@functools.cache
def shared() -> Path:
    """The folder of the job that cases share: recipe.toml, train.jsonl, heldout.jsonl, media, tokenizer, and of a run
    of it "run" with its checkpoints. It is made at the first call and deleted at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="motet-shared-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    from cli.tiny_job import write_tiny_job

    job = folder / "job"
    recipe = str(write_tiny_job(job, num_train=24, num_heldout=2))
    arguments = ("train", recipe, "--set", "run.steps=2", "--set", "evaluate.max_new_tokens=1")
    (scratch := folder / "scratch").mkdir()
    answer = first_server().run(arguments, job, scratch, 600)
    if answer["code"]:
        raise RuntimeError(f"motet {' '.join(arguments)}: {(scratch / 'stderr').read_text()}")
    return job


@functools.cache
def first_server() -> Server:
    """The one that trains the job that is shared, and then runs cases; it ends with this process."""
    server = Server()
    atexit.register(server.__exit__)
    return server


class Server:
    """A process that has imported everything, and runs commands one at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, arguments: Sequence[str], folder: Path, scratch: Path, limit_s: float) -> dict[str, Any]:
        """Run `motet ARGUMENTS` in a folder; stdout, stderr and temporary files are in scratch.

        Returns code, seconds, peak_bytes and over ("", "time" or "memory").
        """
        job = {"arguments": list(arguments), "folder": str(folder), "scratch": str(scratch), "limit_s": limit_s}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def run_cases(
    cases: Sequence[Case], *, workers: int = 1, limit_s: float = LIMIT_S, keep: Path | None = None
) -> Iterator[Outcome]:
    """The outcomes of all cases, as they come. keep: a folder in which the cases' folders are left."""
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(f"cases of one name: {sorted({name for name in names if names.count(name) > 1})}")
    shared()
    servers: SimpleQueue[Server] = SimpleQueue()

    def run(case: Case) -> Outcome:
        server = servers.get()
        try:
            return run_case(case, server, limit_s, keep)
        finally:
            servers.put(server)

    num_servers = min(workers, len(cases))
    with contextlib.ExitStack() as stack:
        servers.put(first_server())
        for _ in range(1, num_servers):
            servers.put(stack.enter_context(Server()))
        pool = stack.enter_context(ThreadPoolExecutor(num_servers or 1))
        stack.callback(pool.shutdown, cancel_futures=True)
        for done in as_completed([pool.submit(run, case) for case in cases]):
            yield done.result()


def run_case(case: Case, server: Server, limit_s: float = LIMIT_S, keep: Path | None = None) -> Outcome:
    """Prepare a case, run it and judge how it ended."""
    top = Path(tempfile.mkdtemp(prefix=re.sub(r"\W+", "-", case.name)[:60] + "-", dir=keep))
    folder, scratch = top / "case", top / "scratch"
    folder.mkdir()
    scratch.mkdir()
    try:
        case.prepare(folder)
        before = _contents(folder)
        answer = server.run(arguments_of(case, folder), folder, scratch, limit_s)
        stdout, stderr = ((scratch / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        crashes = [*folder.rglob("crash-*"), *scratch.rglob("crash-*")]
        lost = before - _contents(folder)
        wrong = tuple(_wrong(case, answer, stdout, stderr, bool(crashes), lost))
        stderr += "".join(f"\n{path.name}: {path.read_text(errors='replace')}" for path in crashes)
    finally:
        if keep is None:
            shutil.rmtree(top, ignore_errors=True)
    return Outcome(case, answer["code"], answer["seconds"], answer["peak_bytes"], stdout, stderr, wrong)


def arguments_of(case: Case, folder: Path) -> list[str]:
    """The command line of a case, after `motet`."""
    return [each.replace("{folder}", str(folder)).replace("{shared}", str(shared())) for each in case.arguments]


def _contents(folder: Path) -> set[tuple[int, ...]]:
    """What files there are, and when each was written last, whatever its name: a file may be renamed, and not lost.

    But for the lock of a run, which says who owns the folder, and indexes, which are built anew from what they are of.
    """
    found = (
        path.lstat()
        for path in folder.rglob("*")
        if path.name != "run.lock" and not any(part.endswith(".motet-index") for part in path.parts)
    )
    return {(at.st_ino, at.st_size, at.st_mtime_ns) for at in found if not stat.S_ISDIR(at.st_mode)}


def _wrong(
    case: Case, answer: dict[str, Any], stdout: str, stderr: str, crashed: bool, lost: set[tuple[int, ...]]
) -> Iterator[str]:
    if answer["over"]:
        yield f"over its limit of {answer['over']}"
        return
    if crashed or "Traceback (most recent call" in stderr + stdout:
        yield "traceback"
        return
    right_code = WRONG_INPUT if case.verdict == "refuse" else 0
    if answer["code"] != right_code:
        yield "verdict" if answer["code"] in (0, WRONG_INPUT) else f"exit code {answer['code']}"
    if case.verdict == "accept":
        if answer["code"] == 0 and not re.search(case.says, stdout + stderr):
            yield "says something else"
        return
    if lost:
        yield "lost or changed files"
    if answer["code"] == right_code:
        sentence = stderr.strip()
        if "\n" in sentence or not re.search(r"[.?!]$", sentence):
            yield "not one sentence"
        if not re.search(case.says, sentence):
            yield "says something else"


def _serve() -> None:
    """Answer jobs; returns in a child, with its command still to be run."""
    import importlib

    _end_with_parent()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # A child that looks for garbage among all that was imported takes a second, and copies its pages.
    for line in sys.stdin:
        job = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _become(job)
            return
        print(json.dumps(_attend(child, job["limit_s"])), flush=True)


def _end_with_parent() -> None:
    """Ask the kernel for a SIGKILL once the parent is gone: a case may hang, or fill the memory."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(job: dict[str, Any]) -> None:
    os.setsid()
    _end_with_parent()
    scratch = Path(job["scratch"])
    for descriptor, path in ((0, Path(os.devnull)), (1, scratch / "stdout"), (2, scratch / "stderr")):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(job["folder"])
    os.environ["TMPDIR"] = job["scratch"]
    tempfile.tempdir = None
    sys.argv = ["motet", *job["arguments"]]


def _attend(child: int, limit_s: float) -> dict[str, Any]:
    """Wait for a child, and kill it with all that it started once it is past a limit."""
    start, over, peak_bytes = time.monotonic(), "", 0
    watched = os.pidfd_open(child)
    while not select.select([watched], [], [], 0.05)[0]:
        peak_bytes = max(peak_bytes, _resident_bytes(child))
        over = "time" if time.monotonic() - start > limit_s else "memory" if peak_bytes > LIMIT_BYTES else ""
        if over:
            break
    seconds = time.monotonic() - start
    for kill in (os.killpg, os.kill) if over else (os.killpg,):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.close(watched)
    _, status, usage = os.wait4(child, 0)
    peak_bytes = max(peak_bytes, 1024 * usage.ru_maxrss)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": round(seconds, 3),
        "peak_bytes": peak_bytes,
        "over": over or ("memory" if peak_bytes > LIMIT_BYTES else ""),
    }


def _resident_bytes(process: int) -> int:
    try:
        return _PAGE_BYTES * int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    _serve()
    if sys.argv[1:]:
        from motet.cli import main

        main()
