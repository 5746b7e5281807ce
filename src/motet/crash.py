"""How a command ends: an exception becomes one sentence on stderr, an exit code, and a traceback in a file.

    0  done
    2  wrong input, in one sentence
    3  a rank died: a defect, no memory, a full disk, or another rank that was lost
    128 + n  ended by signal n

When a rank dies, the others lose their connections to it and die too. Only the rank that failed first prints its
sentence (`train/world.py`); the others write their tracebacks to files.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet.core.errors import (
    JointUserError,
    RankFailure,
    UserError,
    has_lost_rank,
    has_waited_in_vain,
    is_out_of_memory,
    origin_of,
)

WRONG_INPUT, DIED = 2, 3
PATIENCE_S = 20.0
"""How long a rank waits for the first one of its machine to say what is wrong with their recipe."""
_MAX_CHARACTERS = 300
_SURROUNDINGS = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ESTALE,
        errno.ETIMEDOUT,
    )
)
"""Codes of file errors that the machine causes, not Motet: a full disk, a missing permission, no answer, ..."""


@contextmanager
def ended(command: str) -> Iterator[None]:
    """Run the block as a command; end the process when the block ends, as this module says. command: its name."""
    threading.excepthook = _report_thread
    _open_closed_streams()
    try:
        yield
    except BaseException as error:
        _leave(_report(error, command), error)
    _leave(0, None)


def end_rank(sentence: str) -> None:
    """End this rank at once, from any thread. sentence: what it says; "" where another rank says it."""
    if sentence:
        _say(sentence)
    os._exit(DIED)


def _report(error: BaseException, command: str) -> int:
    """Print the sentence for an exception, if this rank is to print it; returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, UserError):
        if _leaves_it_to_another(error):
            time.sleep(PATIENCE_S)
        if _leaves_it_to_another(error) or _speaks(error):
            _say(_stopped(_prefix(error) + str(error)))
        return WRONG_INPUT
    if not isinstance(error, RankFailure):
        path = _write_traceback("".join(traceback.format_exception(error)), origin_of(error).folder)
        if origin_of(error).speaks:
            _say(_sentence(error, command, path))
    return DIED


def _stopped(sentence: str) -> str:
    """The sentence with a full stop, which some callers leave to this module."""
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def _speaks(error: UserError) -> bool:
    """Whether this rank prints the sentence of a UserError."""
    origin = origin_of(error)
    if isinstance(error, JointUserError):
        return os.environ.get("RANK", "0") == "0"
    return origin.speaks if origin.rank is not None else not _leaves_it_to_another(error)


def _leaves_it_to_another(error: UserError) -> bool:
    """Whether the first rank of this machine says it, as before ranks meet all of them read the same recipe.

    torchrun ends all ranks when one has ended. So this rank waits for that, and speaks if the first one does not end.
    """
    has_met = isinstance(error, JointUserError) or origin_of(error).rank is not None
    return not has_met and os.environ.get("LOCAL_RANK", "0") != "0"


def _prefix(error: UserError) -> str:
    rank = origin_of(error).rank
    if _leaves_it_to_another(error):
        rank = int(os.environ.get("RANK", "0"))
    return "" if isinstance(error, JointUserError) or not rank else f"rank {rank}: "


def _sentence(error: BaseException, command: str, path: Path | None) -> str:
    """The sentence for an exception that is no UserError. path: the file with its traceback."""
    origin = origin_of(error)
    where = command if origin.rank is None else f"{command}, rank {origin.rank}"
    message, report = _first_line(error), ""
    if is_out_of_memory(error):
        what = f"ran out of memory{_at(error)} ({message})."
        what += f" {origin.memory_advice}" if origin.memory_advice else ""
    elif has_waited_in_vain(error):
        what = f"waited{_at(error)}, in vain{origin.others}; run.wait_limit_s is how long a rank waits."
    elif has_lost_rank(error):
        lost = origin.others or "another rank"
        what = f"lost {lost}, which died without a word{_at(error)}; the system may have had no memory left."
    elif isinstance(error, OSError) and error.errno in _SURROUNDINGS:
        what = f"cannot go on{_at(error)}: {f'{error.filename}: ' if error.filename else ''}{error.strerror}."
    else:
        own = _own_code(error)
        what = f"failed with {type(error).__name__}{_at(error)}: {message}."
        report = own or "; please report it, if it is Motet's fault"
    what += f" {origin.saved}" if origin.saved else ""
    return f"{where}: {what}" if path is None else f"{where}: {what} The traceback is in {path}{report}."


def _own_code(error: BaseException) -> str:
    """Where code of the user's own has failed, as the rest of a sentence; "" where it was other code, or unknown."""
    paths = sysconfig.get_paths()
    others = [paths["stdlib"], paths["purelib"], paths["platlib"], paths["scripts"]]
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(Path(__file__).parent):
            return ""
        if file.is_file() and not any(file.is_relative_to(folder) for folder in others):
            return f"; it ends in code of your own, {frame.f_code.co_qualname} in {file}, line {line}"
    return ""


def _at(error: BaseException) -> str:
    """What a rank did as it failed, and in which module; if it waited, how long and for whom; as far as it is known."""
    origin, limit, waited = origin_of(error), re.search(r"(\d+) ?ms", str(error)), ""
    if has_waited_in_vain(error):
        waited = f" {int(limit[1]) / 1e3:g} s" if limit else ""
        waited += "" if origin.waits_for is None else f" for rank {origin.waits_for}"
    elif origin.module and not has_lost_rank(error):
        waited = f" in {origin.module},"
    return waited + (f" at {origin.action}" if origin.action else "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else "no message").rstrip(".")
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."


def _write_traceback(text: str, folder: Path | None) -> Path | None:
    """Write a new file in `folder`, else in the folder for temporary files; None if only stderr could be written."""
    rank = f"-rank{os.environ['RANK']}" if "RANK" in os.environ else ""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}{rank}-"
    temporary = Path(tempfile.gettempdir())
    for parent in (temporary,) if folder is None else (folder, temporary):
        try:
            descriptor, path = tempfile.mkstemp(".txt", name, parent)
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError:
            continue
        return Path(path)
    _say(text)
    return None


def _report_thread(args: threading.ExceptHookArgs) -> None:
    """Print that a thread ended with an exception. The process goes on; whoever waits for the thread notices."""
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    if getattr(args.thread, "exception", None) is args.exc_value:
        return  # It is kept to be raised where the thread is waited for, as TensorBoard's does, and is told of there.
    path = _write_traceback("".join(traceback.format_exception(args.exc_value)), None)
    name = args.thread.name if args.thread is not None else "?"
    kind = type(args.exc_value).__name__
    _say(f"The thread {name!r} ended with {kind}: {_first_line(args.exc_value)}. The traceback is in {path}.")


def _say(sentence: str) -> None:
    try:
        print(sentence, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


def _leave(code: int, error: BaseException | None) -> None:
    """Flush standard output and end the process with an exit code."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as failure:
        # Otherwise Python flushes again at exit, and prints that it ignores the exception.
        silence(sys.stdout)
        if code == 0 and not isinstance(failure, BrokenPipeError):
            _say(f"Standard output cannot be written: {failure}.")
            code = DIED
    if code and ("RANK" in os.environ or not isinstance(error, UserError | SystemExit) or code > DIED):
        # Threads may still be inside a collective; shutting down the interpreter or the groups would abort the process.
        os._exit(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open standard streams that were closed before the start, on /dev/null.

    Otherwise the next file that is opened would get a stream's number, and with it what is printed.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def silence(stream: object) -> None:
    """Redirect a stream to /dev/null, as nobody reads it or its disk is full."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())  # type: ignore[attr-defined]
        os.close(descriptor)
    except (OSError, ValueError, AttributeError):
        pass
