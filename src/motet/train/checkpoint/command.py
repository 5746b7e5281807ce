"""`motet checkpoints`: lists and verifies the checkpoints of a run, and says which one `--resume auto` takes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from motet.core.errors import UserError
from motet.train.checkpoint.contents import (
    Damaged,
    RunState,
    is_checkpoint,
    read_manifest,
    step_named,
    verify,
)
from motet.train.checkpoint.folder import checkpoints, checkpoints_set_aside, folder_of_checkpoints, unfinished
from motet.train.checkpoint.remote import NotWhole, RemoteCheckpoints, check_url, checkpoint_at, is_stored


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint's folder and its condition.

    condition:  "whole", "damaged", "unfinished", or "unreadable" if it cannot be judged.
    problem:    a sentence; "" if it is whole.
    size_bytes: on the disk.
    state:      None unless it is whole.
    motet:      the version that wrote it; "" if unknown.
    """

    path: Path
    condition: str
    problem: str
    size_bytes: int
    state: RunState | None = None
    motet: str = ""


def show_checkpoints(source: Path | str, as_json: bool) -> None:
    """Verify and print the checkpoints of a run: its folder, the `checkpoints/` in it, or one of them.

    By URL it is the `checkpoint.url` of a run, or a checkpoint there. Each is copied to a temporary folder for itself.
    Raises UserError if there are none, or if the folder or the store cannot be read.
    """
    if is_stored(source):
        entries = list(_stored(str(source).rstrip("/")))
        # A run fetches the newest one alone.
        _show(entries, taken_by_auto(entries[-1:]), as_json)
        return
    folder = Path(source)
    try:
        paths = _in(folder)
        total_bytes = sum(_size_bytes(path) for path in paths)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}.") from error
    with _bar(total_bytes) as bar:
        task = bar.add_task("verifying", total=total_bytes)
        entries = [_entry(path, lambda num_bytes: bar.advance(task, num_bytes)) for path in paths]
    _show(entries, taken_by_auto(entries), as_json)


def _show(entries: list[FoundCheckpoint], taken: Path | None, as_json: bool) -> None:
    """Print what was found. taken: by `--resume auto`."""
    if as_json:
        report = {"auto": taken.name if taken else None, "checkpoints": [_as_json(entry) for entry in entries]}
        print(json.dumps(report, indent=1))
    else:
        _print(entries, taken)


def _stored(url: str) -> Iterator[FoundCheckpoint]:
    """The checkpoints at a URL, verified. Raises UserError."""
    check_url(url)
    if step_named(Path(url)) is None:
        remote = RemoteCheckpoints(url)
        if not (names := remote.line()):
            raise UserError(f"{url} holds no checkpoints; name the checkpoint.url of a recipe.")
    else:
        remote, name = checkpoint_at(url)
        names = [name]
    for name in names:
        print(f"Fetching {remote.url}/{name}.", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="motet-") as folder:
            try:
                found = _entry(remote.fetch(name, Path(folder)), lambda _: None)
            except NotWhole as error:
                found = FoundCheckpoint(Path(name), "damaged", f"{error}.", 0)
        yield replace(found, path=Path(name))


def taken_by_auto(entries: Iterable[FoundCheckpoint]) -> Path | None:
    """The checkpoint that `--resume auto` takes; None if none is whole, or if a newer one cannot be judged."""
    named = [entry for entry in entries if step_named(entry.path) is not None and entry.condition != "damaged"]
    newest = max(named, key=lambda entry: step_named(entry.path) or 0, default=None)
    return newest.path if newest and newest.condition == "whole" else None


def _in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step. Raises UserError if there are none."""
    if is_checkpoint(folder):
        return [folder]
    inner = folder_of_checkpoints(folder)
    paths = sorted([*checkpoints(inner), *checkpoints_set_aside(inner), *unfinished(inner)], key=_order)
    if not paths:
        raise UserError(f"{folder} holds no checkpoints; name the run.dir of a recipe.")
    return paths


def _order(path: Path) -> tuple[int, str]:
    return int(path.name.removeprefix("step-").partition(".")[0]), path.name


def _entry(path: Path, show: Callable[[int], None]) -> FoundCheckpoint:
    """Verify one checkpoint. show: called with the number of bytes read since its last call."""
    size_bytes = _size_bytes(path)
    if path in unfinished(path.parent):
        return FoundCheckpoint(
            path, "unfinished", "It is being written or removed, or was when a run was killed.", size_bytes
        )
    try:
        state = verify(path, show=show)
        return FoundCheckpoint(path, "whole", "", size_bytes, state, read_manifest(path).motet)
    except Damaged as damage:
        return FoundCheckpoint(path, "damaged", f"{damage}.", size_bytes)
    except UserError as error:
        return FoundCheckpoint(path, "unreadable", str(error), size_bytes)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else 0


def _as_json(entry: FoundCheckpoint) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": entry.path.name,
        "whole": entry.condition == "whole",
        "condition": entry.condition,
        "problem": entry.problem,
        "size_bytes": entry.size_bytes,
    }
    if entry.state is not None:
        progress = asdict(entry.state.progress)
        del progress["stated"]  # Of the recipe, which says it better.
        fields |= {**progress, "num_ranks": entry.state.num_ranks, "written": entry.state.written.isoformat()}
        fields["motet"] = entry.motet
    return fields


def _print(entries: list[FoundCheckpoint], taken: Path | None) -> None:
    console = Console()
    table = Table("checkpoint", "examples", "written", "ranks", "size", "", box=None, pad_edge=False)
    for column in (1, 3, 4):
        table.columns[column].justify = "right"
    for entry in entries:
        known = ("", "", "")
        if entry.state is not None:
            written = entry.state.written.astimezone().strftime("%Y-%m-%d %H:%M")
            known = (f"{entry.state.position:,}", written, str(entry.state.num_ranks))
        table.add_row(escape(entry.path.name), *known, decimal(entry.size_bytes), entry.condition)
    console.print(table)
    for entry in entries:
        if entry.problem:
            console.print(f"{entry.path.name}: {entry.problem}", markup=False, highlight=False, soft_wrap=True)
    last_line = (
        f"--resume auto goes on from {taken.name}." if taken else "There is none that --resume auto can go on from."
    )
    console.print(last_line, markup=False, highlight=False, soft_wrap=True)


def _bar(total_bytes: int) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=total_bytes == 0)
