"""Damaged checkpoints, as motet train resumes from them and motet checkpoints lists them."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bad.files.base import once, scratch, train, whole_job
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
from bad.files.models import GONE, edit_json, header
from bad.run import Case

MANIFEST, STATE, TENSORS, RANK = "manifest.json", "state.json", "tensors.json", "rank-00000.safetensors"
FILES = (MANIFEST, STATE, TENSORS, RANK)
NEWEST = "run/checkpoints/step-00000003"


@once
def trained_job() -> Path:
    """The whole job after three of its four steps, with a checkpoint of each."""
    folder = scratch() / "trained"
    shutil.copytree(whole_job(), folder)
    sets = ("run.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=3")
    overrides = [part for each in sets for part in ("--set", each)]
    command = [sys.executable, "-m", "motet", "train", str(folder / "recipe.toml"), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return folder


def _trained(folder: Path) -> None:
    shutil.copytree(trained_job(), folder, dirs_exist_ok=True)


def _in_newest(change: Change) -> Change:
    """The trained job with its newest checkpoint changed: `change` is given the checkpoint."""

    def prepare(folder: Path) -> None:
        _trained(folder)
        change(folder / NEWEST)

    return prepare


def _in_all(change: Change) -> Change:
    """The trained job with each of its checkpoints changed."""

    def prepare(folder: Path) -> None:
        _trained(folder)
        for checkpoint in sorted((folder / "run/checkpoints").iterdir()):
            change(checkpoint)

    return prepare


def _lists(name: str, change: Change, says: str = "", verdict: str = "accept", where: str = "run") -> Case:
    return Case(f"checkpoints/{name}", ("checkpoints", "{folder}/" + where), verdict, change, says)


def checkpoint_cases(seed: int) -> Iterator[Case]:
    """Each file of a checkpoint damaged: the newest is renamed and an older one used; if all are, the run stops."""
    older = r"step-00000003 is damaged: [^\n]* kept as step-00000003\.damaged(.|\n)*Resuming after step 2"
    damages = _damages(seed)
    for what, change in damages.items():
        yield train(f"resume/{what}", "accept", _in_newest(change), says=older)
        yield _lists(
            f"damaged/{what}", _in_newest(change), r"step-00000003: [^\n]+\n(.|\n)*auto goes on from step-00000002"
        )
    for what in (f"{STATE} cut to a half", f"{RANK} flipped 0", f"{MANIFEST} empty", f"{TENSORS} gone", "empty"):
        change = damages[what]
        yield train(f"resume/all with {what}", "refuse", _in_all(change), says="no whole checkpoint")
        yield _lists(f"damaged/all with {what}", _in_all(change), "none that --resume auto can go on from")
    for what in (f"{STATE} empty", f"{RANK} flipped 0", f"{MANIFEST} gone", f"{TENSORS} a pipe", f"{RANK} a pickle"):
        change, more = damages[what], ("--resume", "{folder}/" + NEWEST)
        yield train(f"resume/PATH with {what}", "refuse", _in_newest(change), says="step-00000003", more=more)
    yield from _nonsense()
    yield from _paths()
    yield from _folders()


def _damages(seed: int) -> dict[str, Change]:
    found: dict[str, Change] = {}
    for file in FILES:
        damages: dict[str, Damage] = {
            "empty": nothing_left,
            "zeros": zeros,
            "a web page": text,
            "cut to a tenth": cut(0.1),
            "cut to a half": cut(0.5),
            "cut by a byte": lambda data: data[:-1],
            "longer": lambda data: data + b"\n{}",
            **{f"flipped {number}": flip(seed + number, 1) for number in range(2)},
            "a pickle": lambda _: pickle.dumps({"step": 3}),
        }
        if file != RANK:
            damages["100,000 brackets"] = lambda _: b"[" * 100_000 + b"]" * 100_000
        else:
            damages["a header of 2^63 bytes"] = overwrite(0, struct.pack("<Q", 2**63))
        for name, damage in damages.items():
            found[f"{file} {name}"] = damaged(file, damage)
        for name, place in PLACES.items():
            if name != "unreadable":
                found[f"{file} {name}"] = placed(file, place)
        # The tensors are the same ones at each step, so that a file of them is as well.
        if file != TENSORS:
            found[f"{file} of another step"] = lambda at, file=file: _of_another(at, file)
    found["empty"] = PLACES["a folder"]
    return found


def _of_another(checkpoint: Path, file: str) -> None:
    shutil.copy(checkpoint.with_name("step-00000002") / file, checkpoint / file)


def sealed(change: Change) -> Change:
    """A change with a manifest made to fit: whoever can write a checkpoint can write its checksums."""

    def apply_and_seal(checkpoint: Path) -> None:
        change(checkpoint)
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        for name, entry in manifest["files"].items():
            if (checkpoint / name).is_file():
                data = (checkpoint / name).read_bytes()
                entry.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        _seal(checkpoint, manifest)

    return apply_and_seal


def _seal(checkpoint: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("sha256", None)
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    stored = manifest | {"sha256": hashlib.sha256(compact).hexdigest()}
    (checkpoint / MANIFEST).write_text(json.dumps(stored, indent=1))


def _edit(file: str, *keys: str | int, value: Any) -> Change:
    return lambda checkpoint: edit_json(checkpoint / file, *keys, value=value)


def _edit_tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change what the checkpoint says of its tensors, by name."""

    def edit(checkpoint: Path) -> None:
        document = json.loads((checkpoint / TENSORS).read_text())
        change(document)
        (checkpoint / TENSORS).write_text(json.dumps(document))

    return edit


def _first(document: dict[str, Any]) -> Any:
    """The entry of the first tensor that is a matrix."""
    return next(entry for entry in document.values() if len(entry["shape"]) == 2)


def _nonsense() -> Iterator[Case]:
    """Files that have their checksums and say what cannot be: of another step, of other data, of other tensors."""
    numbers = {"-5": -5, "10^9": 10**9, "1e30": 1e30, "a text": "3", "null": None, "true": True, "a fraction": 2.5}
    for key in ("step", "position", "num_bad", "num_skipped", "num_ranks"):
        for name, value in numbers.items():
            # What these two are is known from nowhere else; the others are parts of what is known.
            if name == "10^9" and key in ("num_ranks", "position"):
                continue
            yield _sealed_case(f"{key} = {name}", _edit(STATE, key, value=value))
        yield _sealed_case(f"{key} missing", _edit(STATE, key, value=GONE))
    others: dict[str, tuple[str, tuple[str | int, ...], Any]] = {
        "state with a surplus key": (STATE, ("magic",), 1),
        "state of another dataset": (STATE, ("dataset",), "0" * 32),
        "state of another seed": (STATE, ("seed",), 4),
        "state of a date that is none": (STATE, ("written",), "yesterday"),
        "state of a dataset that is a number": (STATE, ("dataset",), 7),
        "manifest of a later format": (MANIFEST, ("format",), 99),
        "manifest of format 0": (MANIFEST, ("format",), 0),
        "manifest of a format that is a text": (MANIFEST, ("format",), "1"),
        "manifest without its files": (MANIFEST, ("files",), {}),
        "manifest of a file elsewhere": (
            MANIFEST,
            ("files", "../../../train.jsonl"),
            {"size_bytes": 1, "sha256": "0" * 64},
        ),
        "manifest of a size that is a text": (MANIFEST, ("files", STATE, "size_bytes"), "7"),
        "manifest of files that are a list": (MANIFEST, ("files",), [1]),
    }
    for name, (file, keys, value) in others.items():
        change = _edit(file, *keys, value=value)
        yield _sealed_case(name, change if file == STATE else _sealed_manifest(change))
    tensors: dict[str, Callable[[dict[str, Any]], object]] = {
        "no tensor": lambda document: document.clear(),
        "a tensor less": lambda document: document.pop(next(iter(document))),
        "a tensor more": lambda document: document.update(magic=_first(document)),
        "another dtype": lambda document: _first(document).update(dtype="int64"),
        "a dtype that is none": lambda document: _first(document).update(dtype="magic"),
        "another shape": lambda document: _first(document).update(shape=[1]),
        "a negative shape": lambda document: _first(document).update(shape=[-1, -1]),
        "a shape of 10^30": lambda document: _first(document).update(shape=[10**30, 1]),
        "no shard": lambda document: _first(document).update(shards=[]),
        "a shard in a file elsewhere": lambda document: _first(document)["shards"][0].update(
            file="../../../train.jsonl"
        ),
        "a shard in a file that is none": lambda document: _first(document)["shards"][0].update(file=STATE),
        "a shard of another shape": lambda document: _first(document)["shards"][0].update(shape=[1, 1]),
        "a shard at a negative place": lambda document: _first(document)["shards"][0].update(offsets=[-1, -1]),
        "a shard past its end": lambda document: _first(document)["shards"][0].update(offsets=[10**9, 0]),
        "a shard of one number": lambda document: _first(document)["shards"][0].update(offsets=[0]),
        "half of a tensor": lambda document: _first(document)["shards"][0].update(
            shape=[_first(document)["shape"][0] // 2, _first(document)["shape"][1]]
        ),
    }
    for name, edit in tensors.items():
        yield _sealed_case(f"tensors with {name}", _edit_tensors(edit))
    for name, damage in _weights().items():
        yield _sealed_case(f"weights {name}", lambda at, damage=damage: damage(at / RANK))


def _sealed_manifest(change: Change) -> Change:
    def edit(checkpoint: Path) -> None:
        change(checkpoint)
        _seal(checkpoint, json.loads((checkpoint / MANIFEST).read_text()))

    return edit


def _weights() -> dict[str, Callable[[Path], object]]:
    def refilled(path: Path, value: float) -> None:
        from safetensors.torch import load_file, save_file

        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        next(tensor for name, tensor in tensors.items() if name.startswith("model."))[...] = value
        save_file(tensors, path)

    return {
        "that are nan": lambda path: refilled(path, float("nan")),
        "cut to a half": lambda path: apply(path, cut(0.5)),
        "empty": lambda path: apply(path, nothing_left),
        "of a dtype that is none": lambda path: apply(path, header(dtype="F7")),
        "of another dtype": lambda path: apply(path, header(dtype="I32")),
        "with offsets past their end": lambda path: apply(path, header(data_offsets=[0, 10**12])),
        "with a header of 4 GB": lambda path: apply(path, overwrite(0, struct.pack("<Q", 2**32))),
        "a pickle": lambda path: path.write_bytes(pickle.dumps({})),
    }


def _sealed_case(name: str, change: Change) -> Case:
    """Whoever names a checkpoint that cannot be what it says is told; nothing is trained, or lost."""
    fitted = change if "manifest" in name else sealed(change)
    return train(f"nonsense/{name}", "refuse", _in_newest(fitted), more=("--resume", "{folder}/" + NEWEST))


def _paths() -> Iterator[Case]:
    """What --resume and motet checkpoints are given that is no checkpoint."""
    paths = {
        "what is not there": "absent",
        "a file": "recipe.toml",
        "a folder of something else": "media",
        "the run": "run",
        "the folder of checkpoints": "run/checkpoints",
        "a file of a checkpoint": f"{NEWEST}/{STATE}",
    }
    for name, path in paths.items():
        more = ("--resume", "{folder}/" + path)
        yield train(f"resume/PATH is {name}", "refuse", _trained, more=more)
    for name in ("what is not there", "a file", "a folder of something else"):
        yield _lists(f"paths/{name}", _trained, verdict="refuse", where=paths[name])
    for name, place in PLACES.items():
        yield _lists(f"paths/{name}", lambda at, place=place: place(at / "run"), verdict="refuse")
    yield train("resume/PATH is empty", "refuse", _trained, more=("--resume", ""))
    yield train("resume/PATH of 10,000 characters", "refuse", _trained, more=("--resume", "x" * 10_000))
    yield _lists("paths/a path of 10,000 characters", lambda at: None, verdict="refuse", where="x" * 10_000)
    yield train("resume/PATH past the end", "refuse", _trained, "run.steps=2")
    # The run has gone as far as it is to go.
    yield train("resume/at the end", "accept", _trained, "run.steps=3")
    yield train("resume/whole", "accept", _trained, says="Resuming after step 3")
    yield train("resume/never", "accept", _trained, more=("--resume", "never"))
    yield train("resume/PATH", "accept", _trained, more=("--resume", "{folder}/" + NEWEST))
    yield _lists("paths/whole", _trained, "auto goes on from step-00000003")


def _folders() -> Iterator[Case]:
    """What stands among checkpoints under the names of some."""
    name = "step-00000009"
    for what, place in PLACES.items():
        if what in ("gone", "unreadable"):
            continue
        change = _in_newest(lambda at, place=place: place(at.with_name(name)))
        # Its name is that of a newer checkpoint: it is called damaged, and the older one is used.
        yield train(f"resume/{what} by the name of one", "accept", change, says="Resuming after step 3")
        yield _lists(f"names/{what} by the name of one", change, "step-00000009")
    names = {
        "a step of 30 digits": "step-" + "9" * 30,
        "a step of 200 digits": "step-" + "9" * 200,
        "digits of another script": "step-٣٣٣",
        "no step": "step-",
        "a negative step": "step--5",
    }
    for what, other in names.items():
        rename = _in_newest(lambda at, other=other: at.rename(at.with_name(other)))
        yield train(f"resume/{what}", "accept", rename, says="Resuming after step 2")
        yield _lists(f"names/{what}", rename)
    shorter = _in_newest(lambda at: at.rename(at.with_name("step-3")))
    yield train("resume/a step by a shorter name", "accept", shorter, says="Resuming after step 3")
    yield train("resume/a pickle of an earlier Motet", "refuse", _in_newest(_pickled), says="pickle")


def _pickled(checkpoint: Path) -> None:
    PLACES["a folder"](checkpoint)
    (checkpoint / ".metadata").write_bytes(pickle.dumps({}))
