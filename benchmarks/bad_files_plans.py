"""Bad Plans, profiles and lengths as files, as motet simulate and motet plan read them. Used by bad_files.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bad_files_base import once, scratch
from bad_files_damage import PLACES, apply, cut, flip, nothing_left, text, zeros
from bad_files_models import GONE, edit_json
from bad_inputs_run import Case

SHAPES = """\
[run]
batch_size = 4

[model.backbone]
num_layers = 2
hidden = 64
mlp = 128
num_heads = 2
vocab_size = 100

[model.encoders.image]
kind = "vit"
num_layers = 1
hidden = 32
mlp = 64
num_heads = 2
projector = { downsample = 4 }

[cluster]
device = "a40"
nodes = 1
ranks_per_node = 2
"""
LENGTHS = """\
[[task]]
name = "chat"
share = 0.5
text = { median = 40, spread = 0.8, max = 400 }
[task.items.image]
length = { value = 64 }
count = { choices = [1, 2], weights = [0.5, 0.5] }
length_per_token = 4
"""
WRONG: dict[str, Any] = {
    "-1": -1,
    "1e30": 1e30,
    "10^30": 10**30,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "a text": "hello",
    "null": None,
    "a list": [1],
    "a table": {"a": 1},
    "true": True,
}
Change = Callable[[Path], None]


@once
def _files() -> Path:
    """plan.json, profile.json and lengths.toml of a small model on two ranks."""
    from motet.core.plan import Plan, Unit
    from motet.core.plan_file import write_plan
    from motet.cost.catalogue import cluster
    from motet.train.plan_recipe import read_job_recipe

    folder = scratch() / "plans"
    folder.mkdir()
    (folder / "shapes.toml").write_text(SHAPES)
    (folder / "lengths.toml").write_text(LENGTHS)
    model = read_job_recipe(folder / "shapes.toml").model
    stages = ({"image": 1, "backbone": 1}, {"backbone": 1})
    unit = Unit("all", stages, pp=2)
    write_plan(Plan(model, cluster("a40", 1, 2), (unit,), batch_size=4, precision="fp32"), folder / "plan.json")
    _profile(model).write(folder / "profile.json")
    return folder


def _profile(model: Any) -> Any:
    """Seconds in proportion to rows for each layer of a model, and for messages between two ranks."""
    from motet.cost.profile import LayerTimes, MessageTimes, ModuleTimes, OptimizerTimes, Points, Profile

    grid, held_out = (((1, 16),), ((2, 64),), ((4, 256),)), (((1, 100),),)

    def points(batches: Any, attends: bool) -> Points:
        rows = [sum(count * length for count, length in batch) for batch in batches]
        pairs = [attends * sum(count * length**2 for count, length in batch) for batch in batches]
        seconds = [1e-6 * row + 1e-9 * pair for row, pair in zip(rows, pairs)]
        return Points(rows=rows, pairs=pairs, forward_s=seconds, input_s=seconds, weight_s=seconds)

    modules = []
    for module in model.modules:
        layers = {(stack.layer.kind, stack.layer.weights): stack.layer for stack in module.stacks}
        times = [
            LayerTimes(
                kind=kind,
                weights=weights,
                grid=points(grid, layer.attention is not None),
                held_out=points(held_out, layer.attention is not None),
            )
            for (kind, weights), layer in layers.items()
        ]
        modules.append(ModuleTimes(name=module.name, grid=grid, held_out=held_out, layers=times))
    sizes = [1e3, 1e5, 1e7]
    kinds = ("gather", "reduce_scatter", "all_reduce", "exchange", "send")
    messages = [
        MessageTimes(kind=kind, num_ranks=2, num_nodes=1, size_bytes=sizes, seconds=[1e-5, 1e-4, 1e-2])
        for kind in kinds
    ]
    optimizer = OptimizerTimes(num_parameters=[1e3, 1e6], seconds=[1e-6, 1e-3])
    about = {"recipe": "demo", "device": "cpu", "precision": "float32", "torch": "2.0", "num_ranks": 2}
    return Profile(modules=modules, messages=messages, optimizer=optimizer, measured_at="2026-01-01T00:00:00Z", **about)


def plan_cases(seed: int) -> Iterator[Case]:
    """Bytes, numbers and keys of a Plan, a profile and lengths; each is read beside whole ones."""
    for file in ("plan.json", "profile.json", "lengths.toml"):
        yield from _bytes_of(file, seed)
    yield from _values_of("plan.json", json.loads((_files() / "plan.json").read_text()))
    yield from _values_of("profile.json", json.loads((_files() / "profile.json").read_text()))
    yield from _placements()
    yield _case("simulate/plan.json/whole", lambda at: None, "accept")
    yield _case("simulate/profile.json/whole", lambda at: None, "accept", profile=True)
    yield from _profiles_of_training()


def _case(name: str, change: Change, verdict: Any = "refuse", says: str = "", *, profile: bool = False) -> Case:
    """`motet simulate` of the Plan, for the lengths, and by the profile."""

    def prepare(folder: Path) -> None:
        for file in ("plan.json", "profile.json", "lengths.toml"):
            (folder / file).write_bytes((_files() / file).read_bytes())
        change(folder)

    arguments = ["simulate", "{folder}/plan.json", "--workload", "{folder}/lengths.toml"]
    arguments += ["--profile", "{folder}/profile.json"] if profile else []
    return Case(name, tuple(arguments), verdict, prepare, says)


def _bytes_of(file: str, seed: int) -> Iterator[Case]:
    is_profile, pattern = file == "profile.json", file.replace(".", r"\.")
    damages: dict[str, Callable[[bytes], bytes]] = {
        "empty": nothing_left,
        "zeros": zeros,
        "a web page": text,
        "UTF-16": lambda data: data.decode().encode("utf-16"),
        "a byte that is not UTF-8": lambda data: data.replace(b'"', b'"\xff', 1),
    }
    if file.endswith(".json"):
        damages |= {
            **{f"cut to {share:.0%}": cut(share) for share in (0.1, 0.5, 0.9)},
            "cut by its last bracket": lambda data: data.rstrip()[:-1],
            "100,000 brackets": lambda _: b"[" * 100_000 + b"]" * 100_000,
            "100,000 objects": lambda _: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
            "a list": lambda data: b"[" + data + b"]",
            "a number": lambda _: b"7",
            "null": lambda _: b"null",
            "a number of 5,000 digits": lambda data: b'{"format": ' + b"9" * 5000 + b"," + data.lstrip()[1:],
            "a key twice": lambda data: b'{"magic": 1, "magic": 2, ' + data.lstrip()[1:],
            "a surplus key": lambda data: b'{"magic": 1, ' + data.lstrip()[1:],
            "a lone surrogate": lambda data: b'{"magic\\ud800": 1, ' + data.lstrip()[1:],
            "two of them": lambda data: data + data,
        }
    else:
        for key in ("share = 0.5", "median = 40", "spread = 0.8", "max = 400", "value = 64", "length_per_token = 4"):
            name = key.partition(" = ")[0]
            for what in ("-1", "nan", "inf", "1e30", "9" * 400, '"hello"', "true", "[]", "{}"):
                label = "10^400" if len(what) == 400 else what
                damages[f"{name} = {label}"] = lambda data, key=key, name=name, what=what: data.replace(
                    key.encode(), f"{name} = {what}".encode()
                )
        damages |= {
            "10^9 items": lambda data: data.replace(b"[1, 2]", b"[1000000000, 2]"),
            "weights that are negative": lambda data: data.replace(b"[0.5, 0.5]", b"[-1, 2]"),
            "weights that are nan": lambda data: data.replace(b"[0.5, 0.5]", b"[nan, 1]"),
            "weights that are all 0": lambda data: data.replace(b"[0.5, 0.5]", b"[0, 0]"),
            "fewer weights": lambda data: data.replace(b"[0.5, 0.5]", b"[0.5]"),
            "a surplus key": lambda data: data.replace(b"share", b"magic = 1\nshare"),
            "no text": lambda data: data.replace(b"text =", b"texts ="),
        }
    for name, damage in damages.items():
        change = _damaged(file, damage)
        yield _case(
            f"simulate/{file}/{name}", change, says=pattern if file != "lengths.toml" else "", profile=is_profile
        )
    for name, place in PLACES.items():
        change = lambda at, place=place: place(at / file)  # noqa: E731
        yield _case(f"simulate/{file}/{name}", change, says=pattern, profile=is_profile)
    for number in range(3):
        change = _damaged(file, lambda data, number=number: _garbled(data, seed + number))
        yield _case(f"simulate/{file}/garbled {number}", change, profile=is_profile)
    bom = _damaged(file, lambda data: b"\xef\xbb\xbf" + data)
    yield _case(f"simulate/{file}/a byte order mark", bom, "accept", profile=is_profile)


def _garbled(data: bytes, seed: int) -> bytes:
    """Flipped bits, of which one makes a byte that no text has."""
    return flip(seed, 8)(data) + b"\xff"


def _damaged(file: str, damage: Callable[[bytes], bytes]) -> Change:
    return lambda folder: apply(folder / file, damage)


def _values_of(file: str, document: Any) -> Iterator[Case]:
    """Each key of the whole file, once for those that are alike: other values, none, one more beside it."""
    for place, (keys, value) in enumerate(_once_each(document)):
        where = ".".join(map(str, keys))
        # All of them at all keys would be thousands: five at each, others at the next.
        for number, (name, wrong) in enumerate(WRONG.items()):
            if (place + number) % 2 or _is_right(keys, value, wrong):
                continue
            yield _of_value(f"{file} values/{where} = {name}", file, keys, wrong)
        if _is_needed(file, keys):
            yield _of_value(f"{file} keys/{where} missing", file, keys, GONE)
        if isinstance(value, dict) and file == "profile.json":
            yield _of_value(f"{file} keys/{where} with one more", file, (*keys, "magic"), 1)


def _of_value(name: str, file: str, keys: tuple[str | int, ...], value: Any) -> Case:
    return _case(
        f"simulate/{name}", lambda at: edit_json(at / file, *keys, value=value), profile=file == "profile.json"
    )


_FREE = {"name", "recipe", "device", "torch", "measured_at", "kind"}
"""Texts that may be any other."""
_OPTIONAL = {"format", "messages", "optimizer", "left_out", "tp", "trained", "precision"}


def _once_each(document: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Places in a file, the first of those that differ by numbers in lists alone."""
    seen: set[tuple[str, ...]] = set()
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while waiting:
        keys, value = waiting.pop(0)
        form = tuple("*" if isinstance(key, int) else key for key in keys)
        if keys and form not in seen:
            seen.add(form)
            yield keys, value
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        waiting += [((*keys, key), entry) for key, entry in entries]


def _is_right(keys: tuple[str | int, ...], value: Any, wrong: Any) -> bool:
    """Whether another value can be argued to be right, or is the same kind of thing."""
    if isinstance(value, str) and isinstance(wrong, str):
        return keys[-1] in _FREE
    if isinstance(value, bool) and isinstance(wrong, bool):
        return True
    # An optional part that is null is not there; of numbers that count nothing here, a large one is a number.
    return (wrong is None and keys[-1] in ("optimizer", "attention")) or (keys[-1] in _FREE and isinstance(wrong, str))


def _is_needed(file: str, keys: tuple[str | int, ...]) -> bool:
    return not isinstance(keys[-1], int) and keys[-1] not in _OPTIONAL and file == "profile.json"


def _placements() -> Iterator[Case]:
    """Plans that are well formed and cannot be."""
    wrong: dict[str, tuple[tuple[str | int, ...], Any]] = {
        "a first rank past the end": (("units", 0, "first_rank"), 2),
        "a first rank of 10^9": (("units", 0, "first_rank"), 10**9),
        "more stages than ranks": (("units", 0, "pp"), 4),
        "10^6 data ranks": (("units", 0, "dp"), 10**6),
        "a layer too many": (("units", 0, "stages", 1, "backbone"), 2),
        "a layer too few": (("units", 0, "stages", 1, "backbone"), 0),
        "a module that is not there": (("units", 0, "stages", 1, "audio"), 1),
        "an empty stage": (("units", 0, "stages", 1), {}),
        "no units": (("units",), []),
        "an unknown schedule": (("schedule",), "magic"),
        "an unknown precision": (("precision",), "int3"),
        "an unknown order": (("order",), "magic"),
        "zero = 4": (("units", 0, "zero"), 4),
        "shards that do not divide": (("units", 0, "shard_size"), 3),
        "a batch that does not divide": (("microbatch_size",), 3),
        "a batch of 10^12": (("batch_size",), 10**12),
        "recomputation of layers that are not there": (("units", 0, "recompute"), [{"backbone": 9}, {}]),
        "a fill that is no action": (("fills",), [{"rank": 0, "action": "magic"}]),
        "a version that is to come": (("motet_plan",), 99),
        "a cluster of no device": (("cluster",), {"device": "magic"}),
        "a model that is a path to nothing": (("model",), "absent.toml"),
        "a model that is its own file": (("model",), "plan.json"),
        "a model that is a folder": (("model",), "."),
        "a surplus key": (("magic",), 1),
        "a surplus key of a unit": (("units", 0, "magic"), 1),
        "a surplus key of the cluster": (("cluster", "magic"), 1),
        "a surplus key of a module": (("model", "modules", 0, "magic"), 1),
    }
    for name, (keys, value) in wrong.items():
        yield _of_value(f"plan.json placement/{name}", "plan.json", keys, value)
    for key in ("motet_plan", "model", "cluster", "units", "batch_size"):
        yield _of_value(f"plan.json placement/{key} missing", "plan.json", (key,), GONE)
    unknown = lambda at: edit_json(at / "profile.json", "modules", 0, "name", value="other")  # noqa: E731
    yield _case("simulate/profile.json placement/of another model", unknown, profile=True)
    other = lambda at: edit_json(at / "profile.json", "precision", value="bfloat16")  # noqa: E731
    yield _case("simulate/profile.json placement/in another precision", other, profile=True)


def _profiles_of_training() -> Iterator[Case]:
    """The same damage where motet plan reads it, and where motet train balances by it."""
    from bad_files_base import train

    few: dict[str, Callable[[bytes], bytes]] = {
        "empty": nothing_left,
        "cut to a half": cut(0.5),
        "a web page": text,
        "100,000 brackets": lambda _: b"[" * 100_000 + b"]" * 100_000,
    }
    places = {name: place for name, place in PLACES.items() if name != "unreadable"}
    changes: dict[str, Change] = {name: _damaged("profile.json", damage) for name, damage in few.items()}
    changes |= {name: (lambda at, place=place: place(at / "profile.json")) for name, place in places.items()}
    for name, change in changes.items():

        def prepare(folder: Path, change: Change = change) -> None:
            for file in ("profile.json", "shapes.toml", "lengths.toml"):
                (folder / file).write_bytes((_files() / file).read_bytes())
            change(folder)

        arguments = ("plan", "{folder}/shapes.toml", "--workload", "{folder}/lengths.toml")
        out = ("--out", "{folder}/out.json", "--profile", "{folder}/profile.json")
        yield Case(f"plan/profile.json/{name}", (*arguments, *out), "refuse", prepare, r"profile\.json")

        def beside(folder: Path, change: Change = change) -> None:
            (folder / "profile.json").write_bytes((_files() / "profile.json").read_bytes())
            change(folder)

        sets = ("balance.cost='profile'", "balance.profile='profile.json'")
        yield train(f"profile.json/{name}", "refuse", beside, *sets, says=r"profile")
    for name, place in places.items():

        def lengths(folder: Path, place: Change = place) -> None:
            (folder / "shapes.toml").write_text(SHAPES)
            (folder / "lengths.toml").touch()
            place(folder / "lengths.toml")

        arguments = (
            "plan",
            "{folder}/shapes.toml",
            "--workload",
            "{folder}/lengths.toml",
            "--out",
            "{folder}/out.json",
        )
        yield Case(f"plan/lengths.toml/{name}", arguments, "refuse", lengths, r"lengths\.toml")
