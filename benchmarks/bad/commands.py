"""Cases of command lines for bad_inputs.py: every option and argument of every command, read off the commands."""

from __future__ import annotations

import functools
import inspect
import os
import random
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from typer.models import ArgumentInfo, OptionInfo

from bad.documents import write_plan_file
from bad.run import Case, Verdict
from bad.settings import JOB, TRAIN
from bad.values import HUGE
from motet.cli import app
from motet.train.recipe.toml_text import dump_toml

LENGTHS = "text_tokens,image_width,image_height,audio_seconds\n20,280,280,1.5\n9,,,2\n30,560,280,\n"
SAMPLER = dump_toml(JOB["workload"])


def write_inputs(folder: Path) -> None:
    """What the commands are given: a recipe to plan, a Plan, lengths, a profile's place, and what is no file."""
    (folder / "job.toml").write_text(dump_toml(JOB))
    (folder / "lengths.csv").write_text(LENGTHS)
    (folder / "sampler.toml").write_text(SAMPLER)
    write_plan_file(folder)
    (folder / "some folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    (folder / "empty").touch()


@dataclass(frozen=True)
class Base:
    """A command line that is right, and its files."""

    arguments: tuple[str, ...]
    prepare: Callable[[Path], None] = write_inputs


PLANNED = ("plan", "{folder}/job.toml", "--out", "{folder}/out.json")
BASES: Mapping[str, Base] = {
    "train": Base((*TRAIN, "--set", "run.dir={folder}/run")),
    "plan": Base(PLANNED),
    "simulate": Base(("simulate", "{shared}/recipe.toml", "--cluster", "a40", "--ranks-per-node", "2")),
    "analyze": Base(("analyze", "{folder}/lengths.csv", "--ranks", "2", "--batch-size", "4", "--batches", "2")),
    "profile": Base(("profile", "{shared}/recipe.toml", "--seconds", "1", "--out", "{folder}/profile.json")),
    "demo-data": Base(("demo-data", "{folder}/demo", "--num-train", "1", "--num-heldout", "1")),
    "checkpoints": Base(("checkpoints", "{shared}/run")),
    "export": Base(("export", "{shared}/run/checkpoints/step-00000002", "--out", "{folder}/exported")),
    "recipe-schema": Base(("recipe-schema",)),
}

NO_FILES = ("some folder", "fifo", "absent", "absent/absent", "binary", "empty", "/dev/zero", "/dev/full", "")
"""What stands where a file is to be read."""
NO_PLACES = ("some folder", "fifo", "absent/absent", "empty/absent", "/dev/full", "")
"""What stands where a file is to be written. What is written into a FIFO hangs until somebody reads it."""
NO_FOLDERS = ("fifo", "empty/absent", "/dev/full", "")
"""What stands where a folder is to be written, which is made."""
WORDS: Mapping[str, tuple[str, ...]] = {
    "--set": ("", "=", "run", "run.steps", "=3", ".=3", "run.=3", "run.steps=", "run.steps=[", "a.b.c.d=1", "run=[]",
              "run.steps=1\nrun.seed=2", "x" * 10_000, "run.steps=1=2", "run.steps.x=3"),
    "--pin": ("", "tp", "tp=", "tp=0", "tp=-1", "tp=nan", "tp=1.5", "tp=1000000000", "tp=1000000000000", "=8", "xp=2",
              "strategy=magic", "schedule=2f2b", "recompute=maybe", "video.pp=2", "image.pp=0", "image.xp=2", ".pp=2"),
    "--cluster": ("", "h1000", "cpu:0", "H100 80GB", "nan", "../a40"),
    "--mix": ("", "columns", "Rows ", "nan"),
    "--launch": ("", "pbs", "Slurm ", "nan"),
    "--resume": ("", "sometimes", "/dev/zero", "{folder}/fifo", "{folder}/some folder", "{folder}/empty", "-1"),
}  # fmt: skip
"""Wrong words for options that take some; what is no word at all is tried too."""
TOGETHER: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "analyze": (
        ("--ranks", "100000", "--batch-size", "1000000", "--batches", "10000"),
        ("--batch-size", "1000000", "--batches", "10000"),
        ("{folder}/lengths.csv",),
        ("--tokenizer", "{shared}/tokenizer", "--set", "run.steps=1"),
    ),
    "plan": (
        ("--nodes", "100000", "--ranks-per-node", "1024"),
        ("--cluster", "h100", "--nodes", "100000"),
        ("--cluster", "h100", "--nodes", "100000", "--set", "run.batch_size=1000000"),
        ("--pin", "tp=2", "--pin", "tp=2"),
        ("--pin", "tp=1024"),
        ("--png", "{folder}/out.json"),
        ("--measure", "1000000"),
    ),
    "simulate": (
        ("--nodes", "100000", "--ranks-per-node", "1024"),
        ("--set", "run.batch_size=1000000", "--nodes", "100000"),
        ("--workload", "{folder}/plan.json"),
    ),
    "demo-data": (("--num-train", "1000000000", "--num-heldout", "1000000000"),),
    "train": (("--resume", "never", "--resume", "sometimes"), ("extra",)),
}
"""Options that are wrong together, or for what is given."""

DECIDED: Mapping[str, Verdict] = {
    # 800,000 ranks.
    "plan/together/1: --cluster h100 --nodes 100000": "accept",
    # Six examples are not dealt out evenly to so many ranks.
    "simulate/options/--nodes 10": "refuse",
    # Nor are there so many ranks.
    "simulate/options/--actions 10": "refuse",
    "simulate/options/--actions 1048576": "refuse",
    "simulate/options/--nodes 100000": "refuse",
    "simulate/options/--ranks-per-node 10": "refuse",
    "simulate/options/--ranks-per-node 1024": "refuse",
}
"""By the name of a case, what more than the type and the bounds of an option decides."""
UNTRIED: frozenset[str] = frozenset(
    (
        # Right, and takes longer than a case may.
        "simulate/options/--batches 10000",
        "analyze/options/--batches 10000",
        "profile/options/--seconds 86400",
        "profile/options/--seconds 1000.0",
        "profile/options/--seconds 1e3",
        "demo-data/options/--num-train 1000000",
        "demo-data/options/--num-heldout 1000000",
        "plan/options/--measure 10",
        "plan/options/--measure 1000",
        "plan/options/--measure 1",
    )
)


def cases(seed: int) -> Iterator[Case]:
    """All cases of command lines, the same for a seed."""
    rng = random.Random(f"commands {seed}")
    for case in [*_of_no_command(), *_of_commands(rng)]:
        if case.name not in UNTRIED:
            yield case


def _of_no_command() -> Iterator[Case]:
    for words in (("bogus",), ("--bogus",), ("Train",), ("",), ("train ",), ("-x",), ("--version=3",)):
        yield Case(f"motet/commands/{' '.join(words)}", words, "refuse")
    yield Case("motet/commands/--version", ("--version",), "accept")
    yield Case("motet/commands/--help", ("--help",), "accept")


def _of_commands(rng: random.Random) -> Iterator[Case]:
    for info in app.registered_commands:
        assert info.callback is not None
        name = info.name or info.callback.__name__
        case = functools.partial(_case, name)
        yield case("commands", "as it is", (), "accept")
        yield Case(f"{name}/commands/--help", (name, "--help"), "accept")
        yield Case(f"{name}/commands/nothing", (name,), "refuse")
        yield case("commands", "--bogus", ("--bogus",), "refuse", "--bogus")
        yield case("commands", "-z", ("-z",), "refuse", "-z")
        yield case("commands", "an argument more", ("extra", "extra"), "refuse", "extra")
        for number, more in enumerate(TOGETHER.get(name, ())):
            yield case("together", f"{number}: {' '.join(more)}", more, "refuse")
        hints = typing.get_type_hints(info.callback, include_extras=True)
        for parameter in inspect.signature(info.callback).parameters.values():
            annotated = hints[parameter.name]
            kind, about = typing.get_args(annotated)
            if isinstance(about, ArgumentInfo):
                yield from _of_argument(name)
            elif isinstance(about, OptionInfo):
                # In Annotated, typer keeps the first of the option's own names where a default would stand.
                names = [each for each in (about.default, *(about.param_decls or ())) if str(each).startswith("--")]
                option = names[0] if names else f"--{parameter.name.replace('_', '-')}"
                yield from _of_option(case, option, _plain(kind), about, rng)


def _case(command: str, group: str, what: str, more: tuple[str, ...], verdict: Verdict, says: str = "") -> Case:
    """The right line of a command with more behind it."""
    base, name = BASES[command], f"{command}/{group}/{what}"
    return Case(name, (*base.arguments, *more), DECIDED.get(name, verdict), base.prepare, says)


def _plain(kind: Any) -> Any:
    """The type of a value that is given, of a type that may be None, or a list of them."""
    if typing.get_origin(kind) in (UnionType, typing.Union):
        (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
    return typing.get_args(kind)[0] if kind == list[Path] else kind


def _of_argument(command: str) -> Iterator[Case]:
    """What stands in the place of the file that a command is about."""
    base, writes = BASES[command], command == "demo-data"
    for place in NO_FOLDERS if writes else NO_FILES:
        if command == "checkpoints" and place == "":
            continue  # It is looked into.
        given = place if place.startswith("/") or not place else f"{{folder}}/{place}"
        arguments = (base.arguments[0], given, *base.arguments[2:])
        for ending in (".toml", ".json", ".csv", "") if place == "binary" else ("",):
            name = f"{command}/files/argument {place}{ending}"
            rename = functools.partial(_write_ended, ending) if ending else base.prepare
            yield Case(name, (arguments[0], given + ending, *arguments[2:]), "refuse", rename)


def _write_ended(ending: str, folder: Path) -> None:
    write_inputs(folder)
    (folder / "binary").rename(folder / f"binary{ending}")


def _of_option(
    case: Callable[..., Case], option: str, kind: Any, about: OptionInfo, rng: random.Random
) -> Iterator[Case]:
    if kind is bool:
        yield case("options", f"{option}=3", (f"{option}=3",), "refuse", option)
        return
    yield case("options", f"{option} alone", (option,), "refuse", option)
    says = re.escape(option)
    if kind in (int, float):
        least, most = about.min, about.max
        numbers = ["word", "nan", "inf", "-inf", "", "1.5", "10", "1e3", "-1", "0", str(10**9), str(10**12), str(HUGE)]
        numbers += [str(bound) for bound in (least, most) if bound is not None]
        numbers += [str(most + 1)] if most is not None else []
        for text in dict.fromkeys(numbers):
            verdict: Verdict = "accept" if _number_holds(kind, least, most, text) else "refuse"
            yield case("options", f"{option} {text}", (option, text), verdict, says if verdict == "refuse" else "")
    elif kind is Path:
        reads = option in ("--workload", "--profile", "--tokenizer", "--recipe")
        for place in NO_FILES if reads else NO_FOLDERS if about.metavar == "DIR" else NO_PLACES:
            given = place if place.startswith("/") or not place else f"{{folder}}/{place}"
            yield case("files", f"{option} {place}", (option, given), "refuse")
    else:
        for word in WORDS[option]:
            yield case("options", f"{option} {word[:40]!r}", (option, word), "refuse")


def _number_holds(kind: Any, least: float | None, most: float | None, text: str) -> bool:
    try:
        value = kind(text)
    except ValueError:
        return False
    return (least is None or value >= least) and (most is None or value <= most) and abs(value) < HUGE
