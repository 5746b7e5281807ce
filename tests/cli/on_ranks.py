"""`motet` on several ranks without torchrun, whose processes import everything anew: seconds less for each rank.

What the command of torchrun itself does (its exit code, what it prints, signals) is tested with real ones, marked so.
`motet_under_agent` has its agent, which starts ranks anew, and forks them.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from cli.meddling import Meddling
from motet.cli import main
from ranks import run_ranks, start_server


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


def motet_under_agent(num_ranks: int, *words: object, meddling: Meddling | None = None, max_restarts: int = 0) -> Ended:
    """As `torchrun --standalone --max-restarts ... -m motet WORDS`, by the same agent.

    returncode: of the rank that failed first. What is said is that of the ranks in their order, each of all attempts.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    start_server()
    # The agent leaves its handlers of signals behind.
    former = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            max_restarts=max_restarts,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/logs"),
        )
        code = 0
        try:
            elastic_launch(config, _attempt)(folder, os.getcwd(), meddling, [str(word) for word in words])
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        said = ["".join(Path(folder, f"{name}-{rank}").read_text() for rank in range(num_ranks)) for name in "12"]
    return Ended(code, *said)


def _attempt(said: str, folder: str, meddling: Meddling | None, words: list[str]) -> None:
    for descriptor in (1, 2):
        path = f"{said}/{descriptor}-{os.environ['RANK']}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(folder)
    if meddling is not None:
        meddling.begin()
    sys.argv = ["motet", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
