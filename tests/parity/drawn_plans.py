"""The cases of the fuzzer of Plans: each is made again from (seed, number).

Everything that a Plan can say is drawn, and what training cannot run yet (`planning/trainable.obstacle`) is drawn anew.
So what it learns to run is drawn from then on; a field that `PlannedCase` gets joins with a line in `_OPTIONS`.

The number says strategy and schedule, so that there are equally many cases of each pair. PER_MIXTURE cases that follow
each other have the same model and examples, so that one process computes them once. Every CUT_EVERY-th case is a step
of data parallelism in which ranks share some items (`parity/cut_steps.py`), and another one a Plan of data parallelism,
most of them with ranks that share products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise, takewhile
from math import gcd
from zlib import crc32

import numpy as np

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.planning.trainable import obstacle
from motet.schedule import planned, validate
from motet.schedule.plan_units import joins_all_replicas
from motet.train.optimizers import OPTIMIZERS
from parity.cut_steps import Cut, drawn_cut, smaller_cuts
from parity.data_parallel_plans import recipe_of_case
from parity.planned import PHASES, PlannedCase
from parity.planned_generators import BLOCKS_MADE
from parity.planned_parts import SECOND, has_second, num_blocks_with

NUM_HEADS = 4
MAX_RANKS = 5
NUM_EXPERTS = {"mixtral": 4, "qwen3_moe": 6}
"""Of the families with experts, as `parity.planned` makes them."""
NUM_BLOCKS = {"image": 3, "audio": 2, "backbone": 4}
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
_IN_CHUNKS, _ZERO_BUBBLE = ("interleaved_1f1b", "zb_v"), ("zb_h1", "zb_v")
"""Schedules with several stages a rank, of which no rank has copies of encoders; schedules of one pipeline."""
_ONE_PIPELINE = ("chain", "replicated", "bubbles")
CELLS = tuple(
    (strategy, schedule)
    for schedule in SCHEDULES
    for strategy in GROUPINGS
    if not ("replicated" in strategy and schedule in _IN_CHUNKS)
    if strategy in _ONE_PIPELINE or schedule not in _ZERO_BUBBLE
)
"""(strategy, schedule) of the cases 0, 1, 2, ..., over and over."""
PER_MIXTURE = 20
CUT_ITEMS, CUT_EVERY, FIRST_CUT = "cut items", 10, 3
"""The strategy of cases in which ranks share items; the first one. CUT_EVERY has no factor of the number of CELLS."""
WHOLE_MODULES, FIRST_WHOLE = "data parallel", 8
"""The strategy of cases whose ranks all run every module; the first one, of every CUT_EVERY, too."""
FROZEN = (
    *("image", "image encoder", "image block", "audio", "audio encoder", "backbone", "backbone block"),
    *("*.q_proj.*", "*norm*"),
)
LORA = ("image", "audio", "backbone", "backbone *_proj", "backbone down_proj")
_PARTS = (
    *[()] * 6,
    *[("queries",), ("tiles",), ("queries", "tiles")],
    *[("rows",), ("sum",), ("rows", "tiles"), ("rows", "queries"), ("sum", "queries")],
    *[("again",), ("again",), ("again", "tiles"), ("again", "rows", "queries")],
)
"""Parts of the model, as of `parity.planned_parts`."""
_AHEAD = (*[()] * 5, ("ahead",), ("prefix",), ("ahead", "prefix"))
"""Further ones: rows that see some behind them."""
_MADE = ((("draw",), ("recall",), ("etch",)), (("draw", "say"), ("draw", "recall"), ("retell", "say")))
"""Generators, of one or of two; some are given turns, and some have blocks that stages share."""
_MIXTURE = {
    "tied": lambda rng: bool(rng.random() < 0.3),
    "frozen": lambda rng: tuple(map(str, rng.choice(FROZEN, rng.choice([0, 0, 1, 2]), replace=False))),
    "contents": lambda rng: tuple(name for name in PHASES if rng.random() < 0.8),
    "parts": lambda rng: _PARTS[int(rng.integers(len(_PARTS)))] + _AHEAD[int(rng.integers(len(_AHEAD)))],
    "left_out": lambda rng: float(rng.choice([0, 0, 0, 0.3])),
    "batch_size": lambda rng: int(rng.choice([1, 2, 3, 4, 6, 6, 8, 12, 12, 18, 24])),
    "dropout": lambda rng: float(rng.choice([0, 0, 0, 0.2])),
    "lora": lambda rng: tuple(map(str, rng.choice(LORA, rng.choice([0, 0, 1, 2]), replace=False))),
    "num_layers": lambda rng: NUM_BLOCKS["backbone"],
    "family": lambda rng: str(rng.choice(["qwen2", "qwen2", "qwen3", "llama", "phi3", "olmo2"])),
    "seed": lambda rng: int(rng.integers(2**31)),
    "optimizer": lambda rng: str(rng.choice(["adamw"] * 7 + sorted(set(OPTIMIZERS) - {"adamw"}))),
    "has_large": lambda rng: bool(rng.random() < 0.3),
    "made": lambda rng: _MADE[number - 5][int(rng.integers(3))] if (number := int(rng.integers(7))) > 4 else (),
}
"""Field of a PlannedCase -> how it is drawn for a mixture: what one process computes."""
_OPTIONS = {
    "blocking": lambda rng: bool(rng.random() < 0.3),
    "caps": lambda rng: {"image": int(rng.choice([25, 40])), "backbone": 120} if rng.random() < 0.1 else {},
    "deferred_warmup": lambda rng: bool(rng.random() < 0.5),
    "balance": lambda rng: str(rng.choice(["off", "off", "joint", "per_phase", "auto"])),
    "example_order": lambda rng: str(rng.choice(["given", "given", "intra", "inter", "both"])),
    "fill_seed": lambda rng: int(rng.integers(-1000, 1000)),
    "filling": lambda rng: str(rng.choice(["static", "by_step"])),
    "is_mixed": lambda rng: bool(rng.random() < 0.1),
    "chunks": lambda rng: int(rng.choice([1, 2, 3])),
    "exchange": lambda rng: str(rng.choice(["auto", "group_cast", "all_gather", "ulysses"])),
    "head_groups": lambda rng: int(rng.choice([1, 2])),
    "nodes": lambda rng: (int(rng.integers(0, 3)), int(rng.integers(2, 4))) if rng.random() < 0.05 else (0, 0),
}
"""Field of a PlannedCase -> how it is drawn for a case. Each has random numbers of its own, so that a new field leaves
the others as they were.
"""
_RESUMED = 0.1
"""The share of cases that stop after a step, and go on under another Plan."""
_MAX_ATTEMPTS = 5000


@dataclass(frozen=True)
class DrawnCase:
    """number: what makes it again, with the seed. obstacles: what was drawn before, and cannot be run."""

    number: int
    strategy: str
    case: PlannedCase | Cut
    obstacles: Counter[str]


def draw(seed: int, number: int) -> DrawnCase:
    """The first case of this number that training can run."""
    obstacles: Counter[str] = Counter()
    if number % CUT_EVERY == FIRST_CUT:
        return DrawnCase(number, CUT_ITEMS, drawn_cut(seed, number), obstacles)
    strategy, schedule = CELLS[number % len(CELLS)]
    of_mixture = seed, number // PER_MIXTURE
    mixture = _with_other_images(_with_experts(_drawn(_MIXTURE, of_mixture), of_mixture), of_mixture)
    mixture = _with_merge(_with_diffusers(_with_keys(mixture, of_mixture), of_mixture), of_mixture)
    mixture = _with_learned_positions(mixture, of_mixture)
    if number % CUT_EVERY == FIRST_WHOLE:
        strategy, schedule = WHOLE_MODULES, "data_parallel"
    rng = np.random.default_rng((seed, number))
    is_resumed = rng.random() < _RESUMED
    for attempt in range(_MAX_ATTEMPTS):
        case = _drawn_case(strategy, schedule, mixture, (seed, number, attempt))
        if why := obstacle_of(case):
            obstacles[why] += 1
            continue
        if is_resumed and not case.is_mixed:
            case = replace(case, then=_another(case, mixture, (seed, number)))
        return DrawnCase(number, strategy, _with_long_sequences(case), obstacles)
    raise RuntimeError(f"case {number}: nothing that can be run in {_MAX_ATTEMPTS} draws: {obstacles}")


def _with_long_sequences(case: PlannedCase) -> PlannedCase:
    """The case, with sequences, and items, that are too long for a replica where its Plan or the one behind it may cut
    them."""
    cutting = [one for one in (case, case.then) if one and one.balance == "split"]
    if not cutting:
        return case
    longer = {"has_long": True}
    if any(joins_all_replicas(one.plan()) for one in cutting):
        longer["has_large"] = True
    return replace(case, **longer, then=case.then and replace(case.then, **longer))


def _another(case: PlannedCase, mixture: dict[str, object], numbers: tuple[int, ...]) -> PlannedCase:
    """Another Plan for the same model, examples and ranks."""
    rng = np.random.default_rng((*numbers, 1))
    for attempt in range(_MAX_ATTEMPTS):
        strategy, schedule = CELLS[rng.integers(len(CELLS))]
        other = _drawn_case(strategy, schedule, mixture, (*numbers, 1, attempt), case.num_ranks)
        is_other_job = other.num_ranks != case.num_ranks or other.built != case.built
        if not is_other_job and not obstacle_of(other):
            return replace(other, is_mixed=False)
    raise RuntimeError(f"nothing to go on under in {_MAX_ATTEMPTS} draws: {case}")


def _drawn_case(
    strategy: str, schedule: str, mixture: dict[str, object], numbers: tuple[int, ...], num_ranks: int = 0
) -> PlannedCase:
    """A case, which training may not be able to run. num_ranks: 0 to draw it."""
    rng = np.random.default_rng(numbers)
    num_ranks = num_ranks or int(rng.choice([2, 3, 4, 5], p=[0.3, 0.3, 0.25, 0.15]))
    if strategy == WHOLE_MODULES:
        return _drawn_whole(rng, num_ranks, mixture, numbers)
    units = tuple(_units(rng, numbers, strategy, num_ranks, schedule, mixture["parts"]))
    units = _in_tensors(np.random.default_rng((*numbers, crc32(b"tp"))), units, is_shared=strategy == "bubbles")
    if strategy == "bubbles":
        units = _with_own_degrees(np.random.default_rng((*numbers, crc32(b"own degrees in bubbles"))), units)
        units = _in_context(np.random.default_rng((*numbers, crc32(b"cp in bubbles"))), units)
        units = _shared_out(np.random.default_rng((*numbers, crc32(b"zero in bubbles"))), units)
    if num_experts := NUM_EXPERTS.get(mixture["family"]):
        of_experts = np.random.default_rng((*numbers, crc32(b"ep")))
        units = tuple(_in_experts(of_experts, unit, num_experts) for unit in units)
    units = _with_made(np.random.default_rng((*numbers, crc32(b"made units"))), units, mixture["made"])
    backbone = next(unit for unit in units if "backbone" in unit.modules)
    sizes = [size for size in (1, 2, 3, 4) if mixture["batch_size"] % (backbone.dp * size) == 0]
    size = int(rng.choice(sizes or [1]))
    options = _drawn(_OPTIONS, numbers) | ({} if strategy == "bubbles" else {"filling": "static"})
    if backbone.tp > 1 or options["exchange"] not in ("group_cast", "all_gather"):
        options["head_groups"] = 1  # Two tensor-parallel ranks have one head of keys each.
    case = PlannedCase(units, schedule, microbatch_size=size, **mixture, **options)
    return _with_cut_sequences(np.random.default_rng((*numbers, crc32(b"split"))), case)


def _with_cut_sequences(rng: np.random.Generator, case: PlannedCase) -> PlannedCase:
    """A third of the cases that may cut sequences over replicas of the backbone, or items over those of encoders on
    ranks of their own, do."""
    backbone = next(unit for unit in case.units if "backbone" in unit.modules)
    beside = [unit for unit in case.units if unit.first_rank != backbone.first_rank]
    if all(unit.dp == 1 for unit in (backbone, *beside)) or rng.random() >= 1 / 3:
        return case
    cut = replace(case, balance="split")
    return next((one for one in (cut, replace(cut, filling="static")) if not obstacle_of(one)), case)


def _drawn_whole(
    rng: np.random.Generator, num_ranks: int, mixture: dict[str, object], numbers: tuple[int, ...]
) -> PlannedCase:
    """A case whose ranks all run every module. In four of five that may have it, pairs of them share products; with
    experts in two of five, and in most of all ranks share these."""
    num_experts = NUM_EXPERTS.get(mixture["family"])
    tp = 2 if num_ranks % 2 == 0 and rng.random() < (0.4 if num_experts else 0.8) else 1
    blocks = num_blocks_with(mixture["parts"], NUM_BLOCKS)
    blocks |= {name: BLOCKS_MADE.get(name, 1) for name in mixture["made"]}
    recompute = {name: int(rng.integers(0, count + 1)) for name, count in blocks.items() if name in NUM_BLOCKS}
    dp = num_ranks // tp
    unit = Unit(
        "all",
        (blocks,),
        dp=dp,
        tp=tp,
        recompute=(recompute,) if rng.random() < 0.4 else (),
        zero=int(rng.integers(0, 4)),
        shard_size=int(rng.choice([0, 0, *(size for size in (1, 2) if dp % size == 0)])),
    )
    if num_experts:
        unit = _in_experts(np.random.default_rng((*numbers, crc32(b"ep"))), unit, num_experts)
    sizes = [size for size in (1, 2, 3, 4) if mixture["batch_size"] % (dp * size) == 0]
    drawn = _drawn(_OPTIONS, numbers)
    options = {name: drawn[name] for name in ("blocking", "balance", "is_mixed", "chunks", "nodes")}
    return PlannedCase((unit,), "data_parallel", microbatch_size=int(rng.choice(sizes or [1])), **mixture, **options)


def _with_experts(mixture: dict[str, object], numbers: tuple[int, ...]) -> dict[str, object]:
    """A fifth of the mixtures have experts in the backbone, without adapters, which its layers are not all made for."""
    rng = np.random.default_rng((*numbers, crc32(b"experts")))
    return mixture | {"family": str(rng.choice(list(NUM_EXPERTS))), "lora": ()} if rng.random() < 0.2 else mixture


def _with_other_images(mixture: dict[str, object], numbers: tuple[int, ...]) -> dict[str, object]:
    """Half of the mixtures whose image encoder has no further parts have wide rows, tiles, or tiles of one raster."""
    rng, parts = np.random.default_rng((*numbers, crc32(b"stacked"))), mixture["parts"]
    other = ("stacked", "tiled", "lines", "")[int(rng.integers(4))]
    return mixture | {"parts": (other, *parts)} if other and {*parts} <= {"ahead", "prefix"} else mixture


def _with_keys(mixture: dict[str, object], numbers: tuple[int, ...]) -> dict[str, object]:
    """Half of the mixtures whose encoders have no further parts, nor the backbone experts, attend to images beside the
    sequence.
    """
    rng, parts = np.random.default_rng((*numbers, crc32(b"keys"))), mixture["parts"]
    can = {*parts} <= {"ahead", "prefix"} and mixture["family"] not in NUM_EXPERTS
    return mixture | {"parts": ("keys", *parts), "tied": False} if can and rng.random() < 0.5 else mixture


def _with_diffusers(mixture: dict[str, object], numbers: tuple[int, ...]) -> dict[str, object]:
    """A third of the mixtures with a generator of several blocks have one of diffusers in its place."""
    rng, instead = np.random.default_rng((*numbers, crc32(b"diffusers"))), {"etch": "carve", "retell": "weave"}
    return (
        mixture | {"made": tuple(instead.get(name, name) for name in mixture["made"])}
        if rng.random() < 1 / 3
        else mixture
    )


def _with_merge(mixture: dict[str, object], numbers: tuple[int, ...]) -> dict[str, object]:
    """A tenth of the mixtures have a merge of the user's own."""
    rng = np.random.default_rng((*numbers, crc32(b"merge")))
    return mixture | {"parts": (*mixture["parts"], "merge")} if rng.random() < 0.1 else mixture


def _with_learned_positions(mixture: dict[str, object], numbers: tuple[int, ...]) -> dict[str, object]:
    """A fifth of the mixtures whose backbones have neither experts nor keys beside the sequence have learned positions,
    and most of these products that are stored the other way round."""
    rng = np.random.default_rng((*numbers, crc32(b"learned positions")))
    if mixture["family"] in NUM_EXPERTS or "keys" in mixture["parts"] or rng.random() >= 0.2:
        return mixture
    family = str(rng.choice(["gpt2", "gpt2", "opt"]))
    last = {"gpt2": "backbone mlp.c_proj", "opt": "backbone fc2"}[family]
    lora = tuple(last if name == "backbone down_proj" else name for name in mixture["lora"])
    return mixture | {"family": family, "lora": lora}


def _drawn(options: dict[str, Callable[[np.random.Generator], object]], numbers: tuple[int, ...]) -> dict[str, object]:
    known = {field.name for field in fields(PlannedCase)}
    return {
        name: draw_option(np.random.default_rng((*numbers, crc32(name.encode()))))
        for name, draw_option in options.items()
        if name in known
    }


def _units(
    rng: np.random.Generator,
    numbers: tuple[int, ...],
    strategy: str,
    num_ranks: int,
    schedule: str,
    parts: tuple[str, ...],
) -> Iterator[Unit]:
    grouping, first_rank, pp, num_blocks = GROUPINGS[strategy], 0, 0, num_blocks_with(parts, NUM_BLOCKS)
    is_shared = strategy == "bubbles"
    num_of = [num_ranks] * len(grouping) if is_shared else _parts(rng, num_ranks, len(grouping))
    missing = [name for name in num_blocks if not any(name in group for group in grouping)]
    if has_second(parts):
        grouping = tuple(_with_second(group) for group in grouping)
        missing = [name for name in missing if name != SECOND or "image" in missing]
    for group, num in zip(grouping, num_of):
        is_filling = is_shared and pp > 0  # Its pp divides that of the backbone, which comes first.
        pp = int(rng.choice([size for size in range(1, num + 1) if (pp if is_filling else num) % size == 0]))
        # Drawn from random numbers of its own, so that all else stays as it was.
        sharing = np.random.default_rng((*numbers, crc32(f"cp of {group[0]}".encode())))
        sizes = [size for size in range(2, num // pp + 1) if num // pp % size == 0]
        cp = int(sharing.choice(sizes)) if sizes and not is_shared and sharing.random() < 0.3 else 1
        has_chunks = "backbone" in group and schedule in _IN_CHUNKS
        num_stages = pp * (2 if has_chunks else 1)
        stages = _stages(rng, group, num_stages, num_blocks)
        recompute = tuple({name: int(rng.integers(0, n + 1)) for name, n in stage.items()} for stage in stages)
        yield Unit(
            "+".join(group),
            stages,
            first_rank,
            dp=num // pp // cp,
            pp=pp,
            cp=cp,
            replicated=tuple(missing) if "backbone" in group else (),
            recompute=recompute if rng.random() < 0.4 else (),
            zero=int(rng.integers(0, 2 if is_filling else 4)),
            shard_size=int(rng.choice([0, 0, *(size for size in (1, 2) if num // pp // cp % size == 0)])),
        )
        first_rank += 0 if is_shared else num


def _in_tensors(rng: np.random.Generator, units: tuple[Unit, ...], is_shared: bool) -> tuple[Unit, ...]:
    """Two replicas of some units become two tensor-parallel ranks; of units that share ranks, of all or of none."""
    chosen = [rng.random() < 0.3 and unit.dp % 2 == 0 for unit in units]
    if is_shared:
        chosen = [chosen[0] and all(unit.dp % 2 == 0 for unit in units)] * len(units)
    return tuple(
        replace(
            unit, tp=2, dp=unit.dp // 2, shard_size=unit.shard_size if unit.dp // 2 % (unit.shard_size or 1) == 0 else 0
        )
        if is_chosen
        else unit
        for unit, is_chosen in zip(units, chosen)
    )


def _in_context(rng: np.random.Generator, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Two replicas of all units that share ranks become two ranks that share sequences, or items, or of none."""
    if rng.random() < 0.7 or any(unit.dp % 2 for unit in units):
        return units
    return tuple(replace(unit, cp=2 * unit.cp, dp=unit.dp // 2, shard_size=0) for unit in units)


def _with_own_degrees(rng: np.random.Generator, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Half of the encoders beside a backbone whose products two ranks share deal out their items to these, or share
    their rows."""
    own: list[dict[str, int]] = [{} if rng.random() < 0.5 else {"tp": 1, "cp": int(rng.integers(1, 3))} for _ in units]
    return tuple(
        unit if unit is units[0] or unit.tp == 1 or not of else replace(unit, dp=unit.dp * 2 // of["cp"], **of)
        for unit, of in zip(units, own)
    )


def _shared_out(rng: np.random.Generator, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Replicas of half of the encoders beside a backbone that take the same microbatches share out gradients, or also
    parameters, in each of them."""
    backbone, *encoders = units
    found = [backbone]
    for unit in encoders:
        together = unit.dp * unit.pp // backbone.pp
        sizes = [size for size in range(2, together + 1) if together % size == 0]
        if sizes and rng.random() < 0.5:
            unit = replace(unit, zero=int(rng.integers(2, 4)), shard_size=int(rng.choice(sizes)))
        found.append(unit)
    return tuple(found)


def _in_experts(rng: np.random.Generator, unit: Unit, num_experts: int) -> Unit:
    """Ranks of most backbones share experts, in whatever degree divides both."""
    common = gcd(unit.dp * unit.cp, num_experts // unit.tp)
    degrees = [ep for ep in range(2, common + 1) if common % ep == 0]
    return (
        unit
        if "backbone" not in unit.modules or not degrees or rng.random() < 0.2
        else replace(unit, ep=int(rng.choice(degrees)))
    )


def _with_made(rng: np.random.Generator, units: tuple[Unit, ...], made: tuple[str, ...]) -> tuple[Unit, ...]:
    """Generators in the last stage of the backbone, or on further ranks: one or two replicas, two ranks that share a
    replica's items or products, or two stages."""
    if not made:
        return units
    num_ranks, blocks = max(unit.ranks.stop for unit in units), {name: BLOCKS_MADE.get(name, 1) for name in made}
    if rng.random() < 0.5 and num_ranks < MAX_RANKS:
        replicas = int(rng.integers(1, 1 + min(2, MAX_RANKS - num_ranks)))
        recompute = (blocks,) if rng.random() < 0.4 else ()
        behind = Unit("+".join(made), (blocks,), num_ranks, dp=replicas, recompute=recompute, zero=int(rng.integers(4)))
        if replicas == 2 and rng.random() < 0.4:
            behind = replace(behind, dp=1, cp=2)
        elif replicas == 2 and sum(blocks.values()) > len(blocks) and rng.random() < 0.7:
            rest = {name: number - 1 for name, number in blocks.items() if number > 1}
            behind = replace(behind, stages=(dict.fromkeys(made, 1), rest), dp=1, pp=2, recompute=())
        elif replicas == 2 and rng.random() < 0.5:
            behind = replace(behind, dp=1, tp=2)
        return (*units, behind)
    return tuple(
        replace(unit, stages=(*unit.stages[:-1], unit.stages[-1] | blocks)) if "backbone" in unit.modules else unit
        for unit in units
    )


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


def plan_of(case: PlannedCase) -> Plan:
    """The Plan of a case on as many ranks as it has."""
    plan = case.plan()
    return plan if any(case.nodes) else replace(plan, cluster=replace(plan.cluster, ranks_per_node=case.num_ranks))


def obstacle_of(case: PlannedCase | Cut) -> str:
    """Why training cannot run a case: no Plan, or one that it cannot run yet; "" if it can."""
    if isinstance(case, Cut):
        return ""
    try:
        plan = plan_of(case)
        if why := obstacle(plan, recipe_of_case(case.is_mixed)):
            return why
        if case.exchange == "ulysses" and NUM_HEADS % plan.unit_of("backbone").cp:
            return "heads that ranks do not divide"
        program = planned(plan).program
    except UserError as error:
        return f"no Plan: {error}"
    if case.schedule == "data_parallel":
        return ""  # FSDP2 orders its collectives by itself.
    # Ranks are on CPUs, whose hosts wait.
    validate(
        program, holds_up=case.blocking, host_waits=True
    )  # What this refuses is a defect of a generator: it ends the fuzzer.
    return ""


def smaller(case: PlannedCase | Cut) -> Iterator[PlannedCase | Cut]:
    """Cases with one thing less that training can run, in one order."""
    if isinstance(case, Cut):
        yield from smaller_cuts(case)
        return
    if case.then is not None:
        yield replace(case, then=None)
        yield case.then
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
        *({"lora": tuple(name for name in case.lora if name != left)} for left in case.lora),
        *({"schedule": schedule} for schedule in takewhile(lambda each: each != case.schedule, SCHEDULES)),
        *({name: plain[name]} for name in (_MIXTURE | _OPTIONS) if _is_smallest(plain.get(name))),
        {"caps": {}},
        {"chunks": 1},
        {"head_groups": 1},
        {"nodes": (0, 0)},
        *({"units": units} for units in _smaller_units(case.units)),
    ]
    for change in changes:
        one = replace(case, **change)
        if one.then is not None:
            one = replace(one, then=replace(one.then, **{name: getattr(one, name) for name in _MIXTURE}))
        if one != case and not any(obstacle_of(each) for each in (one, one.then) if each is not None):
            yield one


def _is_smallest(default: object) -> bool:
    """Whether the default of a field of a PlannedCase has nothing of what the field says."""
    return default is False or default in ("off", "given", "static", 0.0, -1)


def _smaller_units(units: tuple[Unit, ...]) -> Iterator[tuple[Unit, ...]]:
    for index, unit in enumerate(units):
        for change in ({"recompute": ()}, {"zero": 0}, {"shard_size": 0}, {"tp": 1, "dp": unit.dp * unit.tp}):
            yield (*units[:index], replace(unit, **change), *units[index + 1 :])
    if len(units) == 1 and units[0].pp > 1 and len(units[0].stages) == units[0].pp:
        (unit,) = units
        for index in range(unit.pp - 1):
            joined = Counter(unit.stages[index]) + Counter(unit.stages[index + 1])
            stages = (*unit.stages[:index], dict(joined), *unit.stages[index + 2 :])
            yield (replace(unit, stages=stages, pp=unit.pp - 1, recompute=()),)
