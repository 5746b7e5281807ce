"""`motet` on several ranks without torchrun, whose processes import everything anew: seconds less for each rank.

What torchrun itself does (restarts, its exit code, ranks that fail) is tested with real ones, marked so.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from motet.cli import main
from ranks import run_ranks


@dataclass(frozen=True)
class Ended:
    """How the command of one rank ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def motet_on_ranks(num_ranks: int, *words: object) -> Ended:
    """As `torchrun --nproc-per-node num_ranks -m motet WORDS`: the worst exit code of the ranks, and all they said."""
    ended = run_ranks(_command, num_ranks, os.getcwd(), [str(word) for word in words])
    said = ("".join(each.stdout for each in ended), "".join(each.stderr for each in ended))
    return Ended(max(each.returncode for each in ended), *said)


def _command(rank: int, num_ranks: int, folder: str, words: list[str]) -> Ended:
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    sys.argv = ["motet", *words]
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as errors:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code, printed.getvalue(), errors.getvalue())
