"""Encoders in the bubbles of a backbone's pipeline (Optimus) equal one process: float64 to 1e-10.

Each encoder pipeline takes some of the microbatches. benchmarks/fuzz_plans.py draws many more, among its strategies.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from motet.core.plan import Unit
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.runtime.place import Place
from motet.schedule import coarse_fills, fillable, parse_action, planned
from motet.train.input.planned import StepDecider
from parity.planned import NUM_STEPS, PHASES, PlannedCase, assert_planned, build_hf_model
from tiers import in_tiers

COUNTS = {"image": 3, "audio": 2, "backbone": 3}


def cut(name, *counts):
    """Stages of one module."""
    return tuple({name: count} for count in counts)


def beside(backbone, *encoders, pp=2, dp=1, beside=(), **options):
    """Units of encoders on the ranks of the backbone's. encoders: their stages; a unit has as many pipelines as fit.

    beside: stages of another one, on one rank behind these.
    """
    zero, recompute = options.pop("zero", 0), options.pop("recompute", {})
    units = [Unit("llm", backbone, pp=pp, dp=dp, zero=zero, recompute=recompute.get("llm", ()))]
    for stages in encoders:
        name, num = "+".join(stages[0]), len(stages)
        size = {"dp": pp * dp // num, "pp": num, "zero": min(zero, 1)}
        units.append(Unit(name, stages, **size, recompute=recompute.get(name, ())))
    if beside:
        units.append(Unit("+".join(beside[0]), beside, first_rank=pp * dp))
    return PlannedCase(tuple(units), **options)


IMAGE, AUDIO = cut("image", 3), cut("audio", 2)
LLM = cut("backbone", 1, 2)
BOTH = ({"image": 3, "audio": 2},)
RECOMPUTE = {"llm": ({"backbone": 1}, {"backbone": 2}), "image": ({"image": 2},), "audio": ({"audio": 1},)}
CASES_OF_2 = [
    beside(LLM, IMAGE, AUDIO),
    beside(LLM, BOTH, schedule="gpipe", batch_size=5, tied=True),
    beside(({"audio": 2, "backbone": 1}, {"backbone": 2}), IMAGE, blocking=True),
    beside(LLM, cut("image", 1, 2), AUDIO, microbatch_size=2),
    beside(LLM, ({"image": 2}, {"image": 1, "audio": 2}), batch_size=4),
    beside(LLM, IMAGE, AUDIO, frozen=("image", "audio")),
    beside(LLM, IMAGE, AUDIO, frozen=("image encoder",), contents=("image",)),
    beside(LLM, IMAGE, AUDIO, frozen=("backbone",), contents=("audio",), blocking=True),
    beside(LLM, IMAGE, AUDIO, frozen=("image", "backbone")),
    beside(LLM, IMAGE, AUDIO, contents=(), batch_size=2),
    beside(LLM, IMAGE, AUDIO, recompute=RECOMPUTE, tied=True),
    beside(LLM, BOTH, caps={"backbone": 80, "image": 30}, microbatch_size=2),
    beside(LLM, IMAGE, AUDIO, zero=1, batch_size=3),
    beside(LLM, IMAGE, cut("audio", 1, 1), zero=1, blocking=True),
    beside(({"audio": 2}, {"backbone": 1}, {"backbone": 1}, {"backbone": 1}), IMAGE, schedule="interleaved_1f1b"),
]


def in_halves(case, num_parts):
    """The case with passes of encoders in so many parts, before and after the backbone's. num_parts: by module."""
    plan = case.plan()
    unfilled, encoders = fillable(plan)
    stages, fills = planned(plan).stages, []
    for fill in coarse_fills(unfilled.program, encoders):
        num = num_parts[stages[parse_action(fill.action).stage].modules[0]]
        fills += [replace(fill, action=f"{fill.action}.{part}" if num > 1 else fill.action) for part in range(num)]
    return replace(case, fills=tuple(fills))


def cases_in_halves():
    """Parts of passes that are halves of blocks; a projector with queries is a block without halves.

    Made where they run, not by each rank of each file that imports this one: it takes half a second.
    """
    return [
        in_halves(beside(LLM, IMAGE, AUDIO), {"image": 6, "audio": 4}),
        in_halves(beside(LLM, IMAGE, AUDIO, recompute=RECOMPUTE, frozen=("image block",)), {"image": 5, "audio": 3}),
        in_halves(beside(LLM, BOTH, dropout=0.2, recompute={"image+audio": BOTH}), {"image": 10}),
        in_halves(beside(LLM, cut("image", 1, 2), AUDIO, frozen=("image encoder",)), {"image": 2, "audio": 4}),
        in_halves(beside(LLM, cut("image", 4), cut("audio", 3), parts=("queries",)), {"image": 7, "audio": 5}),
        in_halves(beside(LLM, IMAGE, AUDIO, parts=("keys",)), {"image": 6, "audio": 4}),
        in_halves(beside(LLM, IMAGE, AUDIO, parts=("stacked",)), {"image": 6, "audio": 4}),
        in_halves(beside(LLM, IMAGE, AUDIO, dropout=0.2, filling="by_step"), {"image": 6, "audio": 4}),
    ]


CASES_OF_4 = [
    beside(LLM, IMAGE, AUDIO, dp=2, tied=True),
    beside(LLM, IMAGE, cut("audio", 1, 1), dp=2, zero=3, microbatch_size=2, batch_size=12, frozen=("image encoder",)),
    beside(({"backbone": 1}, {"backbone": 1}, {"backbone": 1}), BOTH, pp=3, contents=("image",)),
    beside(LLM, BOTH, dp=2, zero=1, balance="joint", schedule="gpipe", batch_size=8),
]
NUM_RANDOM = {2: 6, 3: 3, 4: 3}
"""Random cases a number of ranks. Their seeds are 0 to NUM_RANDOM - 1; `random_case` makes one again."""


def any_cut(rng, blocks, num_stages):
    """Blocks in so many stages, cut anywhere."""
    cuts = [0, *sorted(rng.choice(np.arange(1, len(blocks)), num_stages - 1, replace=False).tolist()), len(blocks)]
    return tuple(dict(Counter(blocks[first:stop])) for first, stop in pairwise(cuts))


def random_case(seed, num_ranks):
    """Encoders of any cut, each in bubbles or in the backbone's unit, under any schedule, on any mixture of media."""
    rng = np.random.default_rng((seed, num_ranks, 2))
    dp = 2 if num_ranks == 4 else 1
    pp, schedule = num_ranks // dp, str(rng.choice(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]))
    num_stages = 2 * pp if schedule in ("interleaved_1f1b", "zb_v") else pp
    is_both = num_stages <= 3 and rng.random() < 0.6
    names = ["image", "audio"] if is_both else [str(rng.choice(["image", "audio"]))]
    chain = [name for name, count in COUNTS.items() if name not in names for _ in range(count)]
    groups = [names] if rng.random() < 0.4 else [[name] for name in names]
    encoders = [
        any_cut(rng, [name for name in group for _ in range(COUNTS[name])], int(rng.choice([1, pp])) if pp < 3 else 1)
        for group in groups
    ]
    microbatch_size = int(rng.integers(1, 3))
    frozen = rng.choice(["image encoder", "image", "audio", "backbone"], rng.integers(0, 3), replace=False)
    case = beside(
        any_cut(rng, chain, num_stages),
        *encoders,
        pp=pp,
        dp=dp,
        zero=int(rng.choice([0, 1, 3])),
        schedule=schedule,
        batch_size=dp * microbatch_size * int(rng.integers(pp, 6)),
        microbatch_size=microbatch_size,
        frozen=tuple(map(str, frozen)),
        tied=bool(rng.random() < 0.5),
        contents=tuple(name for name in ("image", "audio") if rng.random() < 0.8),
        blocking=bool(rng.random() < 0.4),
        deferred_warmup=schedule == "interleaved_1f1b" and bool(rng.random() < 0.5),
        seed=seed,
    )
    if rng.random() < 0.4:
        units = [
            replace(
                unit,
                recompute=tuple(
                    {key: int(rng.integers(0, num + 1)) for key, num in one.items()} for one in unit.stages
                ),
            )
            for unit in case.units
        ]
        case = replace(case, units=tuple(units))
    case = replace(case, fill_seed=seed) if rng.random() < 0.6 else case
    return replace(case, filling="by_step") if rng.random() < 0.5 else case


def by_step(case, fill_seed=-1):
    """The case with bubbles that each step fills by itself, in whole passes or (from a seed on) in blocks."""
    return replace(case, filling="by_step", fill_seed=fill_seed)


COPIED = Unit("llm", LLM, pp=2, zero=3, replicated=("image",))
"""Both ranks have the image encoder, and gather it for each pass."""
BESIDE = Unit("llm", LLM, pp=2), Unit("image", IMAGE, dp=2, zero=3, first_rank=2), Unit("audio", AUDIO, dp=2)
"""An encoder on ranks of its own, which gather it for each pass, beside bubbles."""
BY_STEP = {
    2: [
        *(by_step(case, number if number % 4 else -1) for number, case in enumerate(CASES_OF_2) if number % 2 == 0),
        by_step(PlannedCase((COPIED, BESIDE[2]), schedule="gpipe", batch_size=8, seed=1), fill_seed=2),
    ],
    3: [by_step(CASES_OF_4[2])],
    4: [
        by_step(CASES_OF_4[0], fill_seed=1),
        by_step(CASES_OF_4[3]),
        by_step(beside(LLM, IMAGE, AUDIO, dp=2, zero=3, batch_size=12), fill_seed=1),
        by_step(beside(LLM, IMAGE, AUDIO, dp=2, zero=2, batch_size=12, blocking=True)),
        by_step(PlannedCase(BESIDE, batch_size=8), fill_seed=1),
    ],
    5: [
        by_step(beside(LLM, IMAGE, dp=2, zero=3, batch_size=12, beside=AUDIO), fill_seed=1),
        by_step(beside(LLM, IMAGE, dp=2, zero=2, batch_size=12, beside=AUDIO, blocking=True), fill_seed=1),
    ],
}


def shared(case, ep=1):
    """The case on twice as many ranks: two share each sequence, and have items of encoders. ep: of the backbone."""
    units = (replace(unit, cp=2, ep=ep if unit is case.units[0] else 1) for unit in case.units)
    return replace(case, units=tuple(units), family="qwen3_moe" if ep > 1 else case.family)


def with_experts(case, ep):
    """The case with experts in the backbone that replicas share."""
    return replace(case, units=(replace(case.units[0], ep=ep), *case.units[1:]), family="qwen3_moe")


REPLICAS = by_step(beside(LLM, IMAGE, AUDIO, dp=2, zero=1), fill_seed=1)
"""Two replicas of the backbone, whose bubbles each step fills by itself."""
SHARED = [
    shared(beside(LLM, cut("image", 1, 2), AUDIO, microbatch_size=2, zero=1, frozen=("image encoder",))),
    shared(beside(({"audio": 2, "backbone": 1}, {"backbone": 2}), IMAGE, zero=3, schedule="gpipe", blocking=True)),
    by_step(shared(beside(LLM, IMAGE, AUDIO, tied=True)), fill_seed=1),
    shared(beside(LLM, BOTH, contents=("audio",)), ep=2),
    with_experts(beside(LLM, IMAGE, AUDIO, dp=2, tied=True), ep=2),
    with_experts(REPLICAS, ep=2),
]
"""Ranks that share sequences, or experts, with encoders in their bubbles."""


def with_own(*encoders, pp=1, tp=2, cp=1, **options):
    """Encoders with degrees of their own on the ranks of a backbone. encoders: (stages, tp, cp)."""
    units = [Unit("llm", LLM if pp == 2 else cut("backbone", 3), pp=pp, tp=tp, cp=cp, zero=0)]
    for stages, own_tp, own_cp in encoders:
        name, size = "+".join(stages[0]), {"pp": len(stages), "tp": own_tp, "cp": own_cp}
        units.append(Unit(name, stages, **size, dp=pp * tp * cp // (len(stages) * own_tp * own_cp), zero=1))
    return PlannedCase(tuple(units), **options)


OWN = {
    2: [
        with_own((IMAGE, 1, 2), (AUDIO, 1, 1), dropout=0.2, microbatch_size=2),
        with_own((IMAGE, 1, 1), (AUDIO, 2, 1), frozen=("image block",), tied=True),
        with_own((BOTH, 1, 1), frozen=("image", "audio"), contents=("image",)),
        with_own((cut("image", 4), 1, 1), (cut("audio", 3), 1, 1), parts=("queries",)),
        with_own((IMAGE, 1, 1), (AUDIO, 1, 2), tp=1, cp=2, microbatch_size=2),
    ],
    4: [
        with_own((cut("image", 1, 2), 1, 2), (cut("audio", 1, 1), 1, 1), pp=2, microbatch_size=2, blocking=True),
        with_own((({"image": 2}, {"image": 1, "audio": 2}), 1, 1), pp=2),
        by_step(with_own((IMAGE, 1, 1), (AUDIO, 1, 2), pp=2), fill_seed=1),
        with_own((cut("image", 1, 2), 1, 1), (AUDIO, 1, 2), pp=2, tp=1, cp=2),
        with_own((IMAGE, 2, 1), (AUDIO, 2, 2), cp=2),
        with_own((IMAGE, 1, 2), (AUDIO, 2, 1), cp=2, microbatch_size=2, dropout=0.2),
        by_step(with_own((IMAGE, 1, 1), (AUDIO, 1, 2), cp=2, frozen=("image block",), tied=True)),
        # Items are cut over several of the backbone's context-parallel ranks.
        with_own((IMAGE, 1, 4), (AUDIO, 2, 2), cp=2, has_large=True, microbatch_size=2, dropout=0.2),
        with_own((BOTH, 1, 4), cp=2, has_large=True, tied=True),
    ],
    6: [with_own((IMAGE, 1, 3), (AUDIO, 1, 6), cp=3, has_large=True, microbatch_size=2)],
    8: [with_own((IMAGE, 1, 2), (AUDIO, 1, 1), pp=2, cp=2)],
}
"""Fewer ranks share products of an encoder than of the backbone, or its sequences, and deal out its items."""


def sharing(case, zero, **options):
    """The case with gradients of encoders (ZeRO 2) or also their parameters (3) shared out in each microbatch."""
    backbone, *encoders = case.units
    own = [
        unit if unit.first_rank else replace(unit, zero=zero, shard_size=unit.dp * unit.pp // backbone.pp)
        for unit in encoders
    ]
    return replace(case, units=(backbone, *own), **options)


ONE_PIPELINE = (cut("image", 1, 2), cut("audio", 1, 1))
SHARING = {
    4: [
        sharing(beside(LLM, IMAGE, AUDIO, dp=2, zero=1, batch_size=12, tied=True), 3),
        sharing(beside(LLM, *ONE_PIPELINE, dp=2, zero=3, batch_size=12, frozen=("image encoder",)), 2),
        sharing(beside(LLM, IMAGE, AUDIO, dp=2, batch_size=12, recompute=RECOMPUTE, blocking=True), 3),
        sharing(beside(LLM, BOTH, dp=2, zero=1, batch_size=16, microbatch_size=2, frozen=("image",)), 3, left_out=0.2),
        sharing(by_step(beside(LLM, IMAGE, AUDIO, dp=2, zero=1, batch_size=12, dropout=0.2), fill_seed=1), 3),
        sharing(by_step(beside(LLM, IMAGE, cut("audio", 1, 1), dp=2, zero=2, batch_size=12, blocking=True)), 2),
        # Groups of ranks deal out the items of a microbatch, and share the encoder out.
        sharing(with_own((IMAGE, 1, 2), (cut("audio", 1, 1), 1, 1), pp=2, microbatch_size=2, dropout=0.2), 3),
        sharing(beside(LLM, IMAGE, AUDIO, dp=2, batch_size=12, fill_seed=3, is_mixed=True), 3),
    ],
    5: [
        sharing(beside(LLM, IMAGE, dp=2, batch_size=12, beside=AUDIO), 3),
        sharing(by_step(beside(LLM, IMAGE, dp=2, zero=2, batch_size=12, beside=AUDIO)), 3),
    ],
    8: [sharing(shared(beside(LLM, IMAGE, AUDIO, dp=2, batch_size=12)), 3)],
}
"""ZeRO 2 and 3 over ranks that take the same microbatches."""


def programs_of(case, rank=0):
    """The Programs of the steps of a case, for the island of a rank."""
    encoders, place = build_hf_model().encoders, Place.of(case.plan(), rank)
    decide = StepDecider(place)
    for number in range(NUM_STEPS):
        tables = tables_of(case.examples(number), PHASES, encoders)
        yield decide(LoadedTables.read([tables], PHASES).lengths).microbatches[0].decision.program


def test_fills_differ_from_step_to_step():
    """Those of the cases below do, microbatches of pipelines among them, so that other messages are sent."""
    rows, taken = [], []
    for case in BY_STEP[2]:
        programs = list(programs_of(case))
        rows.append(len({program.program.actions for program in programs}))
        taken.append(len({tuple(stage.microbatches for stage in program.stages) for program in programs}))
    assert rows.count(NUM_STEPS) >= len(rows) / 2
    assert taken.count(NUM_STEPS) >= 3


def test_a_plan_that_leaves_ranks_over_is_decided_as_it_is_written():
    """Ranks are numbered without those, so that their numbers no longer say which share a node."""
    case = BY_STEP[4][0]
    plan = case.plan()
    units = tuple(replace(unit, first_rank=1) for unit in plan.units)
    plan = replace(plan, units=units, cluster=replace(plan.cluster, num_nodes=2, ranks_per_node=3))
    place, encoders = Place.of(plan.closed_up, 0), build_hf_model().encoders
    decide, expected = StepDecider(place, plan), StepDecider(Place.of(plan, 1))
    for number in range(NUM_STEPS):
        lengths = LoadedTables.read([tables_of(case.examples(number), PHASES, encoders)], PHASES).lengths
        decided = decide(lengths).microbatches[0].decision.program
        assert decided.program == expected(lengths).microbatches[0].decision.program.program
        under = place.under(decided)
        assert under.row.row == decided.program.actions[0]
        assert {rank for stage in under.program.stages for rank in stage.data_ranks} == set(range(4))
        assert [stage.microbatches for stage in under.program.stages] == [one.microbatches for one in decided.stages]


def test_replicas_that_share_experts_have_one_program_in_each_step():
    """They meet in each pass, and would wait for each other in orders of their own, as those without experts have."""
    for case, are_alike in ((with_experts(REPLICAS, ep=2), True), (REPLICAS, False)):
        plan = case.plan()
        islands = [list(programs_of(case, rank)) for rank in (0, 1)]
        assert [Place.of(plan, rank).island for rank in (0, 1)] == [0, 1]
        first, second = ([program.program.actions for program in programs] for programs in islands)
        assert (first == second) == are_alike
        assert len(set(first)) > 1


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(BY_STEP, {2: (0, 1), 3: (0,)}))
def test_fills_by_step_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


ENCODERS = {2: CASES_OF_2, 3: CASES_OF_4[2:3], 4: CASES_OF_4[:2] + CASES_OF_4[3:]}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(ENCODERS, {2: (0, 4), 3: (0,), 4: (1,)}))
def test_encoders_in_bubbles_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({4: [*SHARED, shared(cases_in_halves()[0])]}, {4: (0, 4)}))
def test_encoders_beside_ranks_that_share_sequences_or_experts_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(OWN, {2: (0, 1), 4: (0,)}))
def test_encoders_with_degrees_of_their_own_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(SHARING, {4: (0, 5)}))
def test_encoders_that_are_shared_out_in_each_microbatch_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: cases_in_halves()}, {2: (0, 5)}))
def test_halves_of_blocks_in_bubbles_equal_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_encoders_in_bubbles_equal_one_process(num_ranks):
    """Half of them with passes and blocks of encoders in random order in the bubbles, half with other fills a step."""
    assert_planned(num_ranks, [random_case(seed, num_ranks) for seed in range(NUM_RANDOM[num_ranks])])
