"""The cases of the fuzzer of Plans: each is made again from (seed, number, attempt).

Everything that a Plan can say is drawn, and what training cannot run yet (`planning/trainable.obstacle`) is drawn anew.
So what it learns to run is drawn from then on; a field that `PlannedCase` gets joins with a line in `_OPTIONS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from itertools import pairwise

import numpy as np

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.planning.trainable import obstacle
from motet.schedule import planned, validate
from motet.train.recipe.recipe import Recipe
from parity.planned import PHASES, PlannedCase
from parity.planned_parts import SECOND, has_second, num_blocks_with

NUM_BLOCKS = {"image": 3, "audio": 2, "backbone": 3}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
GROUPINGS = {
    "chain": (("image", "audio", "backbone"),),
    "beside": (("image",), ("audio",), ("backbone",)),
    "encoders in one unit": (("image", "audio"), ("backbone",)),
    "image beside a chain": (("image",), ("audio", "backbone")),
    "audio beside a chain": (("audio",), ("image", "backbone")),
    "replicated": (("backbone",),),
    "image replicated": (("audio",), ("backbone",)),
    "bubbles": (("backbone",), ("image",), ("audio",)),
}
"""Strategy -> the modules of each unit. The units of "bubbles" share the backbone's ranks."""
_OPTIONS = {
    "blocking": lambda rng: bool(rng.random() < 0.3),
    "tied": lambda rng: bool(rng.random() < 0.3),
    "frozen": lambda rng: tuple(
        map(str, rng.choice(["image encoder", "image", "audio", "backbone"], rng.choice([0, 0, 1, 2]), replace=False))
    ),
    "contents": lambda rng: tuple(name for name in PHASES if rng.random() < 0.8),
    "caps": lambda rng: {"image": 40, "backbone": 120} if rng.random() < 0.1 else {},
    "deferred_warmup": lambda rng: bool(rng.random() < 0.5),
    "balance": lambda rng: str(rng.choice(["off", "off", "joint", "per_phase"])),
    "example_order": lambda rng: str(rng.choice(["given", "given", "intra", "inter", "both"])),
}
"""Field of a PlannedCase -> how it is drawn. All are drawn, so that cases stay the same when a field is new."""
_PARTS = (
    *[()] * 6,
    *[("queries",), ("tiles",), ("queries", "tiles")],
    *[("rows",), ("sum",), ("rows", "tiles"), ("rows", "queries"), ("sum", "queries")],
    *[("again",), ("again",), ("again", "tiles"), ("again", "rows", "queries")],
)
"""Parts of the model in cases of odd seeds; those of even seeds have none, as they were before there were any."""
_MAX_ATTEMPTS = 2000


@dataclass(frozen=True)
class DrawnCase:
    """number, attempt: what makes it again, with the seed. obstacles: what was drawn before, and cannot be run."""

    number: int
    attempt: int
    strategy: str
    case: PlannedCase
    obstacles: Counter[str]


def draw(seed: int, number: int) -> DrawnCase:
    """The first case of these numbers that training can run."""
    obstacles: Counter[str] = Counter()
    for attempt in range(_MAX_ATTEMPTS):
        strategy, case = drawn_at(seed, number, attempt)
        why = obstacle_of(case)
        if not why:
            return DrawnCase(number, attempt, strategy, case, obstacles)
        obstacles[why] += 1
    raise RuntimeError(f"nothing that can be run in {_MAX_ATTEMPTS} draws: {obstacles}")


def drawn_at(seed: int, number: int, attempt: int) -> tuple[str, PlannedCase]:
    """A strategy and a case, which training may not be able to run."""
    rng = np.random.default_rng((seed, number, attempt))
    strategy = str(rng.choice(list(GROUPINGS)))
    num_ranks = int(rng.choice([2, 3, 4]))
    schedule = str(rng.choice(SCHEDULES))
    parts = _PARTS[int(np.random.default_rng((seed, number, attempt, 1)).integers(len(_PARTS)))] if seed % 2 else ()
    units = tuple(_units(rng, strategy, num_ranks, schedule, parts))
    known = {field.name for field in fields(PlannedCase)}
    options = {name: draw_option(rng) for name, draw_option in _OPTIONS.items()}
    microbatch_size, num_microbatches = int(rng.integers(1, 4)), int(rng.choice([1, 2, 2, 3, 4, 4, 6]))
    backbone = next(unit for unit in units if "backbone" in unit.modules)
    return strategy, PlannedCase(
        units,
        schedule,
        batch_size=backbone.dp * microbatch_size * num_microbatches,
        microbatch_size=microbatch_size,
        seed=int(rng.integers(2**31)),
        fill_seed=int(rng.integers(-1000, 1000)),
        parts=parts,
        filling=_filling(strategy, units, np.random.default_rng((seed, number, attempt, 2))),
        **{name: value for name, value in options.items() if name in known},
    )


def _filling(strategy: str, units: tuple[Unit, ...], rng: np.random.Generator) -> str:
    """Whether bubbles are filled by step, where they can be; drawn apart from all else."""
    can = strategy == "bubbles" and not any(unit.zero > 1 and unit.dp > 1 for unit in units)
    return "by_step" if can and rng.random() < 0.5 else "static"


def _units(
    rng: np.random.Generator, strategy: str, num_ranks: int, schedule: str, parts: tuple[str, ...]
) -> Iterator[Unit]:
    grouping, first_rank, num_blocks = GROUPINGS[strategy], 0, num_blocks_with(parts, NUM_BLOCKS)
    is_shared = strategy == "bubbles"
    num_of = [num_ranks] * len(grouping) if is_shared else _parts(rng, num_ranks, len(grouping))
    missing = [name for name in num_blocks if not any(name in group for group in grouping)]
    if has_second(parts):
        grouping = tuple(_with_second(group) for group in grouping)
        missing = [name for name in missing if name != SECOND or "image" in missing]
    for group, num in zip(grouping, num_of):
        pp = int(rng.choice([size for size in range(1, num + 1) if num % size == 0]))
        has_chunks = "backbone" in group and schedule in ("interleaved_1f1b", "zb_v")
        num_stages = pp * (2 if has_chunks else 1)
        stages = _stages(rng, group, num_stages, num_blocks)
        recompute = tuple({name: int(rng.integers(0, n + 1)) for name, n in stage.items()} for stage in stages)
        yield Unit(
            "+".join(group),
            stages,
            first_rank,
            dp=num // pp,
            pp=pp,
            replicated=tuple(missing) if "backbone" in group else (),
            recompute=recompute if rng.random() < 0.4 else (),
            zero=int(rng.integers(0, 4)),
            shard_size=int(rng.choice([0, 0, 0, 1, 2])),
        )
        first_rank += 0 if is_shared else num


def _parts(rng: np.random.Generator, num: int, num_parts: int) -> list[int]:
    """num as a sum; 0 where there are fewer than parts, which no Plan has."""
    if num < num_parts:
        return [1] * num_parts
    cuts = [0, *sorted(rng.choice(np.arange(1, num), num_parts - 1, replace=False).tolist()), num]
    return [stop - first for first, stop in pairwise(cuts)]


def _with_second(group: tuple[str, ...]) -> tuple[str, ...]:
    """The modules of a unit with "second" behind "image"."""
    return tuple(name for each in group for name in ((each, SECOND) if each == "image" else (each,)))


def _stages(
    rng: np.random.Generator, group: tuple[str, ...], num_stages: int, num_blocks: dict[str, int]
) -> tuple[dict[str, int], ...]:
    blocks = [name for name in group for _ in range(num_blocks[name])]
    num_stages = min(num_stages, len(blocks))
    cuts = [0, *sorted(rng.choice(np.arange(1, len(blocks)), num_stages - 1, replace=False).tolist()), len(blocks)]
    return tuple(dict(Counter(blocks[first:stop])) for first, stop in pairwise(cuts))


@cache
def _recipe() -> Recipe:
    """What `obstacle` asks of a recipe, as `PlannedCase` trains."""
    return Recipe.model_validate(
        {
            "run": {"dir": "run", "steps": 1, "batch_size": 1, "dtype": "float64"},
            "model": {"backbone": {"family": "qwen2", "path": "weights"}},
            "data": {"train": ["train.jsonl"], "tokenizer": "tokenizer"},
            "optimizer": {"lr": 1e-4},
        }
    )


def plan_of(case: PlannedCase) -> Plan:
    """The Plan of a case on as many ranks as it has."""
    plan = case.plan()
    return replace(plan, cluster=replace(plan.cluster, ranks_per_node=case.num_ranks))


def obstacle_of(case: PlannedCase) -> str:
    """Why training cannot run a case: no Plan, or one that it cannot run yet; "" if it can."""
    try:
        plan = plan_of(case)
        if why := obstacle(plan, _recipe()):
            return why
        program = planned(plan).program
    except UserError as error:
        return f"no Plan: {error}"
    validate(program)  # What this refuses is a defect of a generator: it ends the fuzzer.
    return ""


_STEPWISE = ("frozen", "contents")
"""Options that `smaller` makes smaller one name at a time."""


def smaller(case: PlannedCase) -> Iterator[PlannedCase]:
    """Cases with one thing less that training can run, in one order."""
    backbone = next(unit for unit in case.units if "backbone" in unit.modules)
    step = backbone.dp * case.microbatch_size
    num_microbatches = case.batch_size // step
    plain = {field.name: field.default for field in fields(PlannedCase)}
    changes: list[dict[str, object]] = [
        *({"batch_size": step * fewer} for fewer in range(1, num_microbatches)),
        {"microbatch_size": 1, "batch_size": backbone.dp * num_microbatches},
        *({"contents": tuple(name for name in case.contents if name != left)} for left in case.contents),
        *({"parts": tuple(name for name in case.parts if name != left)} for left in case.parts),
        *({"frozen": tuple(name for name in case.frozen if name != left)} for left in case.frozen),
        *({"schedule": schedule} for schedule in SCHEDULES[: SCHEDULES.index(case.schedule)]),
        *(
            {name: plain[name]}
            for name in _OPTIONS
            if plain.get(name, MISSING) is not MISSING and name not in _STEPWISE
        ),
        {"caps": {}},
        {"filling": "static"},
        {"fill_seed": -1},
        *({"units": units} for units in _smaller_units(case.units)),
    ]
    for change in changes:
        try:
            one = replace(case, **change)
        except (TypeError, ValueError):
            continue
        if one != case and one.batch_size % (backbone.dp * one.microbatch_size) == 0 and not obstacle_of(one):
            yield one


def _smaller_units(units: tuple[Unit, ...]) -> Iterator[tuple[Unit, ...]]:
    for index, unit in enumerate(units):
        for change in ({"recompute": ()}, {"zero": 0}, {"shard_size": 0}):
            yield (*units[:index], replace(unit, **change), *units[index + 1 :])
    if len(units) == 1 and units[0].pp > 1 and len(units[0].stages) == units[0].pp:
        (unit,) = units
        for index in range(unit.pp - 1):
            joined = Counter(unit.stages[index]) + Counter(unit.stages[index + 1])
            stages = (*unit.stages[:index], dict(joined), *unit.stages[index + 2 :])
            yield (replace(unit, stages=stages, pp=unit.pp - 1, recompute=()),)
