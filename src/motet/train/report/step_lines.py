"""JSON files with a line a step. Each line is written whole or not at all; a resumed run cuts the later lines off.

What is cut off is kept aside until the run begins a checkpoint of its own: until then it may go on from a later one
again, whose steps these are (`--resume PATH`).
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.core.files import names_open_file, write_whole

HELDOUT_FILE = "heldout.jsonl"
METRICS = frozenset(("step", "loss", "step_s", "num_tokens", "phases", "balance"))
BAD_STEPS = frozenset(("step", "cause"))
HELDOUT = frozenset(("step", "loss", "exact_match"))
"""Keys that every line of heldout.jsonl has; METRICS are those of metrics.jsonl, BAD_STEPS of bad_steps.jsonl."""
_FILES = {"metrics.jsonl": METRICS, "bad_steps.jsonl": BAD_STEPS, HELDOUT_FILE: HELDOUT}
ASIDE = "cut_off.json"
"""What was cut off of them, and behind which step."""


def to_json(value: Any, **options: Any) -> str:
    """JSON of a value; NaN and infinity become null, as JSON has neither. options: of `json.dumps`."""

    def known(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: known(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [known(item) for item in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(known(value), allow_nan=False, **options)


class Lines:
    """A file of lines. If a line cannot be written, the file stays as it was; the next write tries the line again.

    One that is removed, or moved away, cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open(path, "ab", buffering=0)  # noqa: SIM115
        self._kept = b""

    def write(self, line: str) -> None:
        """Add a line, behind those that could not be written before. Raises OSError where it cannot be either."""
        self._kept += line.encode() + b"\n"
        self._write()

    def close(self) -> None:
        """Write what is left, and close the file. Raises OSError as `write` does."""
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        start, rest = self._file.tell(), memoryview(self._kept)
        if rest and not names_open_file(self._path, self._file.fileno()):  # Which would take it all the same.
            raise FileNotFoundError(errno.ENOENT, "it was removed or moved away", str(self._path))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise
        self._kept = b""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The steps of a file that this run has cut and written."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def heldout_steps(run_dir: Path) -> list[int]:
    """The steps behind which this run has been evaluated."""
    path = run_dir / HELDOUT_FILE
    return [line["step"] for line in read_lines(path)] if path.exists() else []


def go_on_behind(run_dir: Path, first_step: int) -> None:
    """Let the files of a run end with `first_step`: with lines that were kept aside, and without those behind it.

    Raises UserError as `cut_lines` does.
    """
    aside = run_dir / ASIDE
    if aside.exists():
        kept = json.loads(aside.read_bytes())
        for name, lines in kept["lines"].items():
            cut_lines(run_dir / name, kept["step"], _FILES[name])
            before = (run_dir / name).read_bytes() if (run_dir / name).exists() else b""
            if lines:
                write_whole(run_dir / name, before + lines.encode())
    behind = {name: _lines_behind(run_dir / name, first_step, keys) for name, keys in _FILES.items()}
    if any(behind.values()):
        write_whole(aside, json.dumps({"step": first_step, "lines": behind}).encode())
    else:
        forget_aside(run_dir)
    for name, keys in _FILES.items():
        cut_lines(run_dir / name, first_step, keys)


def forget_aside(run_dir: Path) -> None:
    """Remove what is kept aside, as the run begins a checkpoint that leads elsewhere."""
    (run_dir / ASIDE).unlink(missing_ok=True)


def _lines_behind(path: Path, first_step: int, keys: frozenset[str]) -> str:
    """The lines of later steps than `first_step`, each whole; "" of a file that is not there."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n") and (step_of(line, keys) or 0) > first_step]
    return b"".join(whole).decode()


def cut_lines(path: Path, first_step: int, keys: frozenset[str]) -> None:
    """Remove the lines of steps after `first_step`, and a last line that a crash left unfinished.

    Raises UserError if the file has other lines than those of steps with `keys`: it is no file of a run.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        step = step_of(line, keys)
        if step is None and (number < len(lines) or line.endswith(b"\n")):
            raise UserError(f"{path}, line {number}, is no step of a run, so the file is another's; move it away.")
        if step is not None and step <= first_step:
            kept.append(line.rstrip(b"\n") + b"\n")
    write_whole(path, b"".join(kept))


def step_of(line: bytes, keys: frozenset[str]) -> int | None:
    """The step of a line; None if it has no step or lacks any of `keys`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_step = isinstance(value, dict) and value.keys() >= keys and isinstance(value.get("step"), int)
    return value["step"] if is_step else None
