"""Bad recipes as files, and bad run folders and indexes, as motet train meets them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bad.files.base import RECIPE, once, records, scratch, train, whole_job
from bad.files.checkpoints import trained_job
from bad.files.damage import (
    PLACES,
    Change,
    Damage,
    apply,
    cut,
    damaged,
    flip,
    nothing_left,
    overwrite,
    placed,
    text,
    zeros,
)
from bad.run import Case

_OTHERS = ("plan", "simulate", "analyze", "profile")


def recipe_cases() -> Iterator[Case]:
    """Bytes and words of recipe.toml, for each command that reads one."""
    deep = "x = " + "[" * 5_000 + "]" * 5_000 + "\n"
    refused: dict[str, Damage] = {
        "empty": nothing_left,
        "zeros": zeros,
        "a web page": text,
        "cut in a key": lambda data: data[: data.index(b"batch_size") + 4],
        "cut in a text": lambda data: data[: data.index(b'"run"') + 3],
        "UTF-16": lambda data: data.decode().encode("utf-16"),
        "a byte that is not UTF-8": lambda data: data.replace(b'"run"', b'"run\xff"'),
        "a table twice": lambda data: data + b"\n[run]\nsteps = 1\n",
        "a key twice": lambda data: data.replace(b"steps = 4", b"steps = 4\nsteps = 4"),
        "a number of 5,000 digits": lambda data: data.replace(b"steps = 4", b"steps = " + b"9" * 5_000),
        "a number of 400 digits": lambda data: data.replace(b"steps = 4", b"steps = " + b"9" * 400),
        "a fraction of 5,000 digits": lambda data: data.replace(b"lr = 1e-3", b"lr = 1" + b"0" * 5_000 + b".5"),
        "5,000 brackets": lambda data: deep.encode() + data,
        "5,000 dots": lambda data: b".".join([b"a"] * 5_000) + b" = 1\n" + data,
        "a table of 5,000 dots": lambda data: data + b"\n[" + b".".join([b"a"] * 5_000) + b"]\n",
        "a key that is empty": lambda data: b'"" = 1\n' + data,
        "a null character": lambda data: data.replace(b'"run"', b'"run\\u0000"'),
        "a lone surrogate": lambda data: data.replace(b'"run"', b'"run\\ud800"'),
        "an unknown table": lambda data: data + b"\n[magic]\na = 1\n",
        "JSON": lambda _: b'{"run": {"dir": "run"}}',
        "a table that is a number": lambda data: b"data = 7\n" + data.replace(b"[data]", b"[run2]"),
        "a list of tables": lambda data: data.replace(b"[run]", b"[[run]]"),
        "a date": lambda data: data.replace(b"steps = 4", b"steps = 1979-05-27"),
    }
    for name, damage in refused.items():
        yield train(f"recipe/{name}", "refuse", damaged("recipe.toml", damage))
    # What they share is read in one place; that they do is what is tried here.
    few = ("empty", "a byte that is not UTF-8", "a number of 5,000 digits", "5,000 brackets", "a key twice")
    for command in _OTHERS:
        for name in few:
            yield _recipe(command, name, damaged("recipe.toml", refused[name]))
        for name, place in PLACES.items():
            yield _recipe(command, name, placed("recipe.toml", place))
    for name, place in PLACES.items():
        yield train(f"recipe/{name}", "refuse", placed("recipe.toml", place), says=r"recipe\.toml")
    accepted: dict[str, Damage] = {
        "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
        "line ends of Windows": lambda data: data.replace(b"\n", b"\r\n"),
        "no end of its last line": lambda data: data.rstrip(),
    }
    for name, damage in accepted.items():
        yield train(f"recipe/{name}", "accept", damaged("recipe.toml", damage))


def _recipe(command: str, name: str, change: Change) -> Case:
    def prepare(folder: Path) -> None:
        (folder / "recipe.toml").write_text(RECIPE)
        change(folder)

    return Case(f"{command}/recipe/{name}", (command, "{folder}/recipe.toml"), "refuse", prepare, r"recipe\.toml")


def folder_cases() -> Iterator[Case]:
    """The run folder: foreign files, files where folders go, folders where files go."""
    names = ("metrics.jsonl", "summary.json", "report.html", "recipe.toml", "run.lock", "tensorboard", "checkpoints")
    for name in names:
        for what, place in PLACES.items():
            if what in ("gone", "unreadable"):
                continue
            # Nothing of another's is lost by writing a file through a link that leads to none.
            fits = what == "a dangling link" and name not in ("tensorboard", "checkpoints")
            yield train(f"folder/{name} is {what}", "accept" if fits else "refuse", _in_run(name, place), "run.steps=1")
    for what, place in PLACES.items():
        if what not in ("gone", "unreadable"):
            verdict = "accept" if what == "a folder" else "refuse"
            yield train(f"folder/is {what}", verdict, placed("run", place), "run.steps=1")
    # What would be written over, in a folder that is no run's, is of somebody else.
    foreign = {
        "metrics": {"metrics.jsonl": b"\x00\xff garbage\n{\n"},
        "half a line of metrics": {"metrics.jsonl": b'{"step": 1, "loss'},
        "a summary": {"summary.json": b"\xff"},
        "a recipe": {"recipe.toml": b"\xff"},
        "a checkpoint": {"checkpoints/latest/model.pt": b"x"},
        "a file of Lightning": {"checkpoints/epoch=1-step=2.ckpt": b"x"},
        "an unfinished checkpoint": {"checkpoints/step-00000002.tmp/state.json": b"{"},
    }
    for name, files in foreign.items():
        yield train(f"folder/holds {name} of no run", "refuse", _with_files(files), "run.steps=1", says="move it away")
    for name, files in {
        "files of somebody else": {"notes.txt": b"hello", "photos/a.png": b"x"},
        "a lock of garbage": {"run.lock": b"\xff\x00 garbage"},
    }.items():
        yield train(f"folder/holds {name}", "accept", _with_files(files), "run.steps=1")
    yield from _folders_of_runs()
    if os.getuid() != 0:
        yield train("folder/cannot be written", "refuse", _locked, says="run")


def _folders_of_runs() -> Iterator[Case]:
    """A run that goes on, of whose files one is damaged: those that are written anew do not matter."""
    refused: dict[str, Change] = {
        "metrics.jsonl garbage": damaged("metrics.jsonl", lambda _: b"\xff\xfe\n{\n"),
        "metrics.jsonl of 100,000 brackets": damaged(
            "metrics.jsonl", lambda _: b"[" * 100_000 + b"]" * 100_000 + b"\n"
        ),
        "metrics.jsonl of a number of 5,000 digits": damaged(
            "metrics.jsonl", lambda _: b'{"step": ' + b"9" * 5_000 + b"}\n"
        ),
        "metrics.jsonl a pipe": placed("metrics.jsonl", PLACES["a pipe"]),
        "metrics.jsonl a folder": placed("metrics.jsonl", PLACES["a folder"]),
        "tensorboard a pipe": placed("tensorboard", PLACES["a pipe"]),
    }
    accepted: dict[str, Change] = {
        "metrics.jsonl cut in its last line": damaged("metrics.jsonl", cut(0.95)),
        "metrics.jsonl empty": damaged("metrics.jsonl", nothing_left),
        "metrics.jsonl gone": placed("metrics.jsonl", PLACES["gone"]),
        "recipe.toml garbage": damaged("recipe.toml", lambda _: b"\xff"),
        "run.lock empty": damaged("run.lock", nothing_left),
        "tensorboard garbage": lambda run: (run / "tensorboard/events.out.tfevents.1").write_bytes(b"\xff"),
    }
    for verdict, changes in (("refuse", refused), ("accept", accepted)):
        for name, change in changes.items():

            def prepare(folder: Path, change: Change = change) -> None:
                shutil.copytree(trained_job(), folder, dirs_exist_ok=True)
                change(folder / "run")

            yield train(f"folder/of a run with {name}", verdict, prepare)


def _in_run(name: str, place: Change) -> Change:
    def change(folder: Path) -> None:
        (folder / "run").mkdir()
        place(folder / "run" / name)

    return change


def _with_files(files: dict[str, bytes]) -> Change:
    def change(folder: Path) -> None:
        for name, data in files.items():
            path = folder / "run" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return change


def _locked(folder: Path) -> None:
    (folder / "run").mkdir(mode=0o500)


@once
def _indexed() -> Path:
    """The whole job with the index of its data, which `motet.data` builds."""
    from motet.data.index_build import open_index
    from motet.data.text import ChatTokenizer

    folder = scratch() / "indexed"
    shutil.copytree(whole_job(), folder)
    open_index(folder / "train.jsonl", ChatTokenizer.from_directory(folder / "tokenizer"))
    return folder


def index_cases(seed: int) -> Iterator[Case]:
    """An index is a cache: a damaged one is built anew, or refused where that is found in the midst of a run."""
    damages: dict[str, Damage] = {
        "empty": nothing_left,
        "zeros": zeros,
        "a web page": text,
        **{f"cut to {share:.0%}": cut(share) for share in (0.1, 0.5, 0.9, 0.99)},
        "longer": lambda data: data + bytes(100),
        "wrong magic": overwrite(0, b"XXXX"),
        **{f"flipped {number}": flip(seed + number, 2) for number in range(6)},
    }
    for kind in ("arrow", "rows", "lock"):
        for name, damage in damages.items():
            # A rows file of the right size is believed until a row is read: then the run ends with a sentence.
            whole_size = kind == "rows" and name in ("zeros", "wrong magic", *(f"flipped {at}" for at in range(6)))
            change = _in_index(kind, lambda path, damage=damage: apply(path, damage))
            says = "damaged" if whole_size else ""
            yield train(f"index/{kind} {name}", "refuse" if whole_size else "accept", change, says=says)
        for name, place in PLACES.items():
            if name == "unreadable":
                continue
            # A cache is built anew, but nothing of somebody else is removed for it. No lock is needed to read it.
            verdict = "refuse" if (kind, name) == ("arrow", "a folder") else "accept"
            yield train(f"index/{kind} {name}", verdict, _in_index(kind, place))
    for name, place in PLACES.items():
        if name not in ("gone", "a folder", "unreadable"):
            yield train(f"index/folder {name}", "refuse", placed("train.jsonl.motet-index", place))
    yield train("index/of other data", "accept", _other_data)
    yield train("index/whole", "accept", _in_index("arrow", lambda path: None))
    yield train("index/of a file that was mended", "accept", _mended)


def _in_index(kind: str, change: Change) -> Change:
    def prepare(folder: Path) -> None:
        shutil.copytree(_indexed(), folder, dirs_exist_ok=True)
        (path,) = (folder / "train.jsonl.motet-index").glob(f"*.{kind}")
        change(path)

    return prepare


def _other_data(folder: Path) -> None:
    """The index of the whole job beside a manifest of another size."""
    shutil.copytree(_indexed(), folder, dirs_exist_ok=True)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:4]))


def _mended(folder: Path) -> None:
    """An index that was built while a picture was broken."""
    from motet.data.index_build import open_index
    from motet.data.text import ChatTokenizer

    picture = folder / str(records()[2]["image"])
    good = picture.read_bytes()
    picture.write_bytes(b"broken")
    open_index(folder / "train.jsonl", ChatTokenizer.from_directory(folder / "tokenizer"))
    picture.write_bytes(good)
