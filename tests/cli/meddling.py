"""`motet` as a process of its own, meddled with: whatever is to happen happens at the same place, however fast it runs.

A Meddling runs code on one rank just before a call of a function, in the first of torchrun's attempts alone.
`motet(...)` forks the process from the server of `ranks.py`, which has imported everything: it starts in a moment.
For ranks of torchrun: python meddling.py FUNCTION CALL RANK CODE train RECIPE ...
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import resource
import signal
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import NamedTuple

from motet.cli import main

PROGRAM = str(Path(__file__))
TIMEOUT_S = 300


class Meddling(NamedTuple):
    """function: "package.module:Class.name". call: from 1."""

    function: str
    call: int
    rank: int
    code: str

    def arguments(self) -> list[str]:
        return [self.function, str(self.call), str(self.rank), self.code]

    def begin(self) -> None:
        own = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if own[1] != "0" or self.rank not in (-1, int(own[0])):
            return
        module, _, path = self.function.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        calls, function = count(1), getattr(owner, name)

        @functools.wraps(function)
        def meddled(*args, **kwargs):
            if next(calls) == self.call:
                exec(self.code, {"os": os, "signal": signal, "stop": stop, "ranks": ranks, "listening": listening})
            return function(*args, **kwargs)

        setattr(owner, name, meddled)


class Done(NamedTuple):
    """returncode: -number where a signal ended it."""

    returncode: int
    stdout: str
    stderr: str


def motet(
    *arguments: str,
    meddling: Meddling | list[Meddling] | None = None,
    stdout: str = "",
    environment: dict[str, str] | None = None,
    max_file_bytes: int = resource.RLIM_INFINITY,
) -> Done:
    """Run the command line. stdout: a file to write to, in place of what is returned."""
    # Late: PROGRAM is run without pytest's path.
    from ranks import start_server

    with tempfile.TemporaryDirectory() as folder:
        streams = [stdout or f"{folder}/out", f"{folder}/err"]
        process = start_server().Process(
            target=_run, args=(arguments, meddling, streams, environment or {}, max_file_bytes)
        )
        process.start()
        process.join(TIMEOUT_S)
        hangs = process.is_alive()
        process.kill()
        process.join()
        said = ["" if stream == stdout else Path(stream).read_text() for stream in streams]
    assert not hangs, f"it still ran after {TIMEOUT_S} s\n{said}"
    return Done(process.exitcode, *said)


def _run(arguments, meddling, streams, environment, max_file_bytes):
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    for each in [meddling] if isinstance(meddling, Meddling) else meddling or ():
        each.begin()
    sys.argv = ["motet", *arguments]
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))
    main()


def stop(number, *pids):
    for pid in pids:
        os.kill(pid, number)


def listening():
    """Addresses that this process listens on, in hexadecimal as /proc has them: loopback is 0100007F."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    lines = [
        line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]
    ]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]


def ranks():
    """Processes that torchrun has started; for a rank's code."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == os.getppid():
                found.append(int(status.parent.name))
    return found


if __name__ == "__main__":
    function, call, rank, code = sys.argv[1:5]
    del sys.argv[1:5]
    Meddling(function, int(call), int(rank), code).begin()
    main()
