"""Plans, profiles and lengths whose bytes are damaged, as simulate, plan and train read them.

What their keys and numbers may be is tried in `bad.documents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bad.documents import SIMULATE, WITH_PROFILE, write_both, write_profile_file
from bad.files.base import train
from bad.files.damage import PLACES, Change, Damage, cut, damaged, flip, nothing_left, placed, text, zeros
from bad.run import Case, Verdict
from bad.settings import JOB
from motet.train.recipe.toml_text import dump_toml

_FILES = ("plan.json", "profile.json", "sampler.toml")


def plan_cases(seed: int) -> Iterator[Case]:
    """Each of the three files in turn damaged, beside whole ones."""
    of_any, of_json = _of_any(seed), _of_json()
    for file in _FILES:
        for name, damage in {**of_any, **(of_json if file.endswith("json") else _of_lengths())}.items():
            yield _simulate(f"{file}/{name}", file, damaged(file, damage))
        for name, place in PLACES.items():
            yield _simulate(f"{file}/{name}", file, placed(file, place), says=file.replace(".", r"\."))
        yield _simulate(f"{file}/a byte order mark", file, damaged(file, lambda data: b"\xef\xbb\xbf" + data), "accept")
    few = {name: of_any[name] for name in ("empty", "a web page", "zeros")}
    few |= {name: of_json[name] for name in ("cut to a half", "100,000 brackets", "a number of 5,000 digits")}
    changes = {name: damaged("profile.json", damage) for name, damage in few.items()}
    changes |= {name: placed("profile.json", place) for name, place in PLACES.items()}
    for name, change in changes.items():
        yield _plan(f"profile.json/{name}", change, "profile")
        sets = ("balance.cost='profile'", "balance.profile='profile.json'")
        yield train(f"profile.json/{name}", "refuse", _with_profile(change), *sets, says="profile")
    for name, place in PLACES.items():
        yield _plan(f"sampler.toml/{name}", placed("sampler.toml", place), "sampler")


def _with_profile(change: Change) -> Change:
    def prepare(folder: Path) -> None:
        write_profile_file(folder)
        change(folder)

    return prepare


def _simulate(name: str, file: str, change: Change, verdict: Verdict = "refuse", says: str = "") -> Case:
    """`motet simulate` of the Plan for the lengths, by the profile if that is the file in question."""

    def prepare(folder: Path) -> None:
        write_both(folder)
        change(folder)

    arguments = WITH_PROFILE if file == "profile.json" else SIMULATE
    return Case(f"simulate/{name}", arguments, verdict, prepare, says)


def _plan(name: str, change: Change, kind: str) -> Case:
    """`motet plan` of a recipe of shapes; kind: the option that takes the file, "profile" or "sampler"."""

    def prepare(folder: Path) -> None:
        write_both(folder)
        (folder / "recipe.toml").write_text(dump_toml(JOB))
        change(folder)

    given = ("--profile", "{folder}/profile.json") if kind == "profile" else ("--workload", "{folder}/sampler.toml")
    arguments = ("plan", "{folder}/recipe.toml", "--out", "{folder}/out.json", *given)
    return Case(f"plan/{name}", arguments, "refuse", prepare, kind)


def _of_any(seed: int) -> dict[str, Damage]:
    def garbled(number: int) -> Damage:
        # Of the flipped bits, none may lie where it does no harm: the last byte is one that no text has.
        return lambda data: flip(seed + number)(data) + b"\xff"

    return {
        "empty": nothing_left,
        "zeros": zeros,
        "a web page": text,
        "UTF-16": lambda data: data.decode().encode("utf-16"),
        "a byte that is not UTF-8": lambda data: data.replace(b'"', b'"\xff', 1),
        **{f"garbled {number}": garbled(number) for number in range(3)},
    }


def _of_json() -> dict[str, Damage]:
    def first(entry: bytes) -> Damage:
        return lambda data: b"{" + entry + b", " + data.lstrip()[1:]

    return {
        "cut to a tenth": cut(0.1),
        "cut to a half": cut(0.5),
        "cut to nine tenths": cut(0.9),
        "cut by its last bracket": lambda data: data.rstrip()[:-1],
        "100,000 brackets": lambda _: b"[" * 100_000 + b"]" * 100_000,
        "100,000 objects": lambda _: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "100,000 brackets under a key": first(b'"magic": ' + b"[" * 100_000 + b"]" * 100_000),
        "a list": lambda data: b"[" + data + b"]",
        "a number": lambda _: b"7",
        "a text": lambda _: b'"hello"',
        "null": lambda _: b"null",
        "an empty object": lambda _: b"{}",
        "a number of 5,000 digits": first(b'"magic": ' + b"9" * 5000),
        "1e999": first(b'"magic": 1e999'),
        "NaN": first(b'"magic": NaN'),
        "a key twice": first(b'"magic": 1, "magic": 2'),
        "a surplus key": first(b'"magic": 1'),
        "a lone surrogate": first(b'"\\ud800": 1'),
        "two of them": lambda data: data + data,
    }


def _of_lengths() -> dict[str, Damage]:
    """Of TOML, and of what distributions are."""

    def task(old: str, new: str) -> Damage:
        whole = dump_toml({"task": [{"name": "a", "share": 0.5, "text": {"median": 40, "spread": 0.8, "max": 400}}]})
        assert old in whole, whole
        return lambda _: whole.replace(old, new).encode()

    numbers = ("-1", "nan", "inf", "1e30", "9" * 400, '"hello"', "[]", "true")
    return {
        "a table twice": lambda data: data + b"\n[a]\n[a]\n",
        "5,000 brackets": lambda data: b"x = " + b"[" * 5_000 + b"]" * 5_000 + b"\n" + data,
        "a number of 5,000 digits": lambda data: b"x = " + b"9" * 5_000 + b"\n" + data,
        **{f"median = {number[:9]}": task("median = 40", f"median = {number}") for number in numbers},
        **{f"share = {number[:9]}": task("share = 0.5", f"share = {number}") for number in numbers},
        **{f"spread = {number[:9]}": task("spread = 0.8", f"spread = {number}") for number in numbers},
        "max below min": task("max = 400", "max = 400\nmin = 500"),
        "a surplus key": task("share", "magic = 1\nshare"),
        "no text": task("text", "texts"),
        "10^9 items": task(
            "share", "items = { image = { length = { value = 1 }, count = { value = 1000000000 } } }\nshare"
        ),
    }
