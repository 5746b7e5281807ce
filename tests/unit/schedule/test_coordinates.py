"""A rank's first question has one answer, of every kind of Plan, and every answer has its ranks."""

from dataclasses import replace
from itertools import pairwise, product
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.plan import Unit
from motet.schedule import planned
from motet.schedule.coordinates import coordinates, edge_links, farthest_ends, host_of, ranks_of, replica_of
from unit.schedule.plans import VLM, model, plan

SMALL = st.integers(1, 3)
GAP = st.integers(0, 2)
WHOLE = {"image": 4, "audio": 2, "backbone": 8}


@st.composite
def data_parallel(draw):
    unit = Unit("all", (WHOLE,), draw(GAP), dp=draw(st.integers(1, 6)), tp=draw(SMALL), zero=3)
    return plan(VLM, unit, batch_size=2 * unit.dp, schedule="data_parallel", microbatch_size=2)


def axes(draw, max_pp=3):
    return {"dp": draw(SMALL), "pp": draw(st.integers(1, max_pp)), "tp": draw(SMALL), "cp": draw(SMALL)}


def cut(modules, count):
    """Layers, in their order, in so many stages."""
    layers = [name for name, number in modules.items() for _ in range(number)]
    bounds = [number * len(layers) // count for number in range(count + 1)]
    return tuple(
        {name: own.count(name) for name in dict.fromkeys(own)}
        for own in (layers[first:stop] for first, stop in pairwise(bounds))
    )


@st.composite
def chains(draw):
    size = axes(draw)
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb_h1", "zb_v", "interleaved_1f1b"]))
    chunks = {"zb_v": 2, "interleaved_1f1b": 2}.get(schedule, 1)
    unit = Unit("all", cut(WHOLE, size["pp"] * chunks), draw(GAP), **size)
    return plan(VLM, unit, batch_size=unit.dp * unit.pp * 2, num_ranks=100, schedule=schedule)


def in_a_row(draw, *units):
    """Units with ranks of their own, in any order in the cluster, with gaps."""
    first, found = 0, {}
    for number in draw(st.permutations(range(len(units)))):
        name, stages, size = units[number]
        first += draw(GAP)
        found[number] = Unit(name, stages, first, **size)
        first += found[number].num_ranks
    return [found[number] for number in range(len(units))]


@st.composite
def modality_parallel(draw):
    sizes = [{**axes(draw), "dp": 1} for _ in range(2)]
    units = in_a_row(
        draw,
        ("image", cut({"image": 4}, sizes[0]["pp"]), sizes[0]),
        ("audio", ({"audio": 2},), {}),
        ("llm", cut({"backbone": 8}, sizes[1]["pp"]), sizes[1]),
    )
    return plan(VLM, *units, num_ranks=100)


@st.composite
def disaggregated(draw):
    """Data-parallel sizes that divide one another, and such that do not; interleaved, and a generator behind."""
    sizes = [{**axes(draw), "dp": draw(st.integers(1, 4))} for _ in range(3)]
    chunks = draw(st.sampled_from([1, 2]))
    units = in_a_row(
        draw,
        ("encoders", cut({"image": 4, "audio": 2}, sizes[0]["pp"]), sizes[0]),
        ("llm", cut({"backbone": 8}, sizes[1]["pp"] * chunks), sizes[1]),
        ("generator", cut({"generator": 3}, sizes[2]["pp"]), sizes[2]),
    )
    taken = lcm(*(unit.dp for unit in units))
    spec = model(image=4, audio=(2, 0), backbone=8, generator=3)
    return plan(
        spec, *units, batch_size=taken * 6, microbatch_size=taken // units[1].dp, num_ranks=400,
        schedule="interleaved_1f1b" if chunks == 2 else "1f1b",
    )  # fmt: skip


@st.composite
def in_bubbles(draw):
    tp, first = draw(st.sampled_from([1, 2, 4])), draw(GAP)
    llm = Unit("llm", cut({"backbone": 8}, 4), first, dp=draw(SMALL), pp=4, tp=tp, cp=draw(SMALL))
    units = [llm]
    for name, number in (("image", 4), ("audio", 2)):
        pp, share = draw(st.sampled_from([1, 2])), draw(st.sampled_from([one for one in (1, 2, 4) if tp % one == 0]))
        dp = llm.num_ranks // (pp * share)
        units.append(Unit(name, cut({name: number}, pp), first, dp=dp, pp=pp, tp=share))
    return plan(VLM, *units, batch_size=llm.dp * 4, num_ranks=200)


@st.composite
def replicated(draw):
    size = axes(draw)
    unit = Unit("llm", cut({"backbone": 8}, size["pp"]), draw(GAP), **size, replicated=("image", "audio"))
    return plan(VLM, unit, batch_size=unit.dp * 2, num_ranks=100)


STRATEGIES = {
    "data parallel": data_parallel(),
    "chain": chains(),
    "modality parallel": modality_parallel(),
    "disaggregated": disaggregated(),
    "in bubbles": in_bubbles(),
    "replicated": replicated(),
}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


@each_strategy
@given(st.data())
def test_every_rank_stands_in_one_place_and_every_place_has_its_ranks(strategy, data):
    made = data.draw(strategy)
    found = planned(made)
    layout, used = found.layout, {rank for unit in made.units for rank in unit.ranks}
    seen = set()
    for rank in range(made.cluster.num_ranks):
        if rank not in used:
            with pytest.raises(ArgumentError, match=f"no unit of the plan is on rank {rank}"):
                coordinates(layout, rank)
            continue
        own = coordinates(layout, rank)
        assert own.unit.rank(own.p, own.d, own.c, own.t) == rank
        assert own.d // layout.num_replicas(own.unit) == own.island
        assert rank in ranks_of(layout, own.program_rank, own.island)
        seen.add((own.program_rank, own.island, own.c, own.t))
    assert len(seen) == len(used)

    program_ranks = range(found.program.num_ranks)
    shared = [ranks_of(layout, number, island) for number in program_ranks for island in range(layout.num_islands)]
    assert sorted(rank for ranks in shared for rank in ranks) == sorted(used)
    for number, island in ((found.program.num_ranks, 0), (-1, 0), (0, layout.num_islands), (0, -1)):
        with pytest.raises(ArgumentError, match="has no rank"):
            ranks_of(layout, number, island)


@each_strategy
@given(st.data())
def test_stages_are_on_the_ranks_that_say_so(strategy, data):
    made = data.draw(strategy)
    found = planned(made)
    layout = found.layout
    of_units = {unit.name: {rank: coordinates(layout, rank, unit) for rank in unit.ranks} for unit in made.units}
    for stage in found.stages:
        own = of_units[stage.unit.name]
        assert tuple(ranks_of(layout, stage.rank, 0)) == stage.ranks
        for rank in stage.ranks:
            assert (own[rank].program_rank, own[rank].island) == (stage.rank, 0)
            assert stage.index in own[rank].stages
        host = host_of(layout, stage.unit)
        for island in range(layout.num_islands):
            (replica,) = {coordinates(layout, rank).d for rank in ranks_of(layout, stage.rank, island)}
            assert replica == replica_of(layout, stage, island) < host.dp
        p = {own[rank].p for rank in stage.ranks}
        holders = range(stage.unit.pp) if set(stage.layers) <= set(stage.unit.replicated) else p
        assert list(stage.data_ranks) == [rank for rank, at in own.items() if at.p in holders and at.t == 0]
    for rank in range(found.program.num_ranks):
        numbers = found.stages_on(rank)
        assert numbers and all(found.program.stages[number].rank == rank for number in numbers)
        for unit in made.units:
            at = of_units[unit.name].get(ranks_of(layout, rank, 0)[0])
            stages = [found.stages[number] for number in numbers if found.stages[number].unit is unit]
            assert {stage.index for stage in stages} == (set(at.stages) if at else set())


def test_a_unit_says_which_ranks_it_is_without():
    unit = Unit("image", ({"image": 4},)), Unit("audio", ({"audio": 2},), 1), Unit("llm", ({"backbone": 8},), 2)
    layout = planned(plan(VLM, *unit)).layout
    with pytest.raises(ArgumentError, match="unit 'image' is not on rank 2"):
        coordinates(layout, 2, unit[0])


@each_strategy
@given(st.data())
def test_a_message_is_between_nodes_if_any_of_its_ranks_are(strategy, data):
    """Of any island, there or back: all are simulated alike."""
    made = data.draw(strategy)
    size = data.draw(st.integers(1, 12))
    cluster = replace(made.cluster, num_nodes=-(-made.cluster.num_ranks // size), ranks_per_node=size)
    found = planned(replace(made, cluster=cluster))
    for edge in range(len(found.program.edges)):
        source, sink = found.ends(edge)
        ends = farthest_ends(found.layout, source, sink)
        links = {
            link[:2]
            for island, backward in product(range(found.layout.num_islands), (False, True))
            for link in edge_links(found.layout, source, sink, island, backward=backward)
        }
        if made.schedule == "data_parallel":  # Its phases exchange rows of all ranks.
            continue
        assert (ends in links or ends[::-1] in links or source.unit is not sink.unit) if links else ends[0] == ends[1]
        crosses = [sender // size != receiver // size for sender, receiver in links]
        assert (ends[0] // size != ends[1] // size) == any(crosses)
