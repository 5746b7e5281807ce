"""Programs of all kinds, drawn at random: replicas of a DAG of stages, with parts, moves, exchanges and collectives."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from motet.schedule.check.dry_run import event_of
from motet.schedule.dependencies import Dependencies, partner
from motet.schedule.program import Action, Kind, Program, Stage
from motet.simulate import Part, StageTimes


def passes(draw, stage, num_microbatches):
    """The passes of a stage, the same for all microbatches."""
    num_forward, num_backward = (draw(st.sampled_from([0, 1, 2, 3])) for _ in range(2))
    parts = {Kind.F: num_forward, Kind.R: draw(st.integers(0, 2)), Kind.W: draw(st.integers(0, 2))}
    kinds = draw(st.sampled_from([(Kind.F,), (Kind.F, Kind.B), (Kind.F, Kind.R, Kind.B), (Kind.F, Kind.I, Kind.W)]))
    for kind in kinds:
        count = parts.get(kind, num_backward)
        for microbatch in range(num_microbatches):
            for part in range(count) if count else (-1,):
                yield Action(stage, kind, microbatch, part)


def collectives(draw, made, num_microbatches):
    """Gathers and reductions that fit the passes of a stage: of the step or of each microbatch, whole or in slices."""
    count = defaultdict(int)
    for action in made:
        if action.microbatch == 0:
            count[action.kind] += 1
    sliced = {action.kind for action in made if action.part >= 0}
    backward = Kind.I if count[Kind.I] else Kind.B
    weights = Kind.W if count[Kind.W] else Kind.B
    stage = made[0].stage
    for kind, of in ((Kind.GATHER, Kind.F), (Kind.GATHER_B, backward), (Kind.REDUCE, weights)):
        if count[of] and draw(st.booleans()):
            slices = range(count[of]) if of in sliced and draw(st.booleans()) else (-1,)
            for microbatch in range(num_microbatches) if draw(st.booleans()) else (-1,):
                for part in slices:
                    yield Action(stage, kind, microbatch, part)


def moves(draw, edge, made, num_microbatches):
    """What carries data over an edge: nothing, a pair, or an exchange."""
    source, sink = edge
    way = draw(st.sampled_from(["none", "pair", "exchange"]))
    back = {action.kind for action in made[source]} & {Kind.B, Kind.I} and {action.kind for action in made[sink]} & {
        Kind.B,
        Kind.I,
    }
    for microbatch in range(num_microbatches):
        if way == "pair":
            send = Action(source, Kind.SEND_F, microbatch, peer=sink)
            yield from (send, partner(send))
            if back:
                send = Action(sink, Kind.SEND_B, microbatch, peer=source)
                yield from (send, partner(send))
        elif way == "exchange":
            yield Action(source, Kind.EXCHANGE_F, microbatch, peer=sink)
            if back:
                yield Action(source, Kind.EXCHANGE_B, microbatch, peer=sink)


def ordered(program, actions, key):
    """The program with these actions, each rank's in one global order in which nothing waits for what comes later."""
    unordered = [[] for _ in range(program.num_ranks)]
    for action in actions:
        unordered[program.stages[action.stage].rank].append(action)
    dependencies = Dependencies(replace(program, actions=tuple(map(tuple, unordered))))
    together = defaultdict(list)
    for action in actions:
        together[event_of(action, program)].append(action)
    needs = {
        one: {event_of(needed, program) for action in members for needed in dependencies.of(action)}
        for one, members in together.items()
    }
    rows = [[] for _ in range(program.num_ranks)]
    done = set()
    while len(done) < len(together):
        ready = [one for one in together if one not in done and needs[one] <= done]
        assert ready, "a drawn program that cannot be ordered"
        one = min(ready, key=key)
        done.add(one)
        for action in together[one]:
            rows[program.stages[action.stage].rank].append(action)
    return replace(program, actions=tuple(map(tuple, rows)))


@st.composite
def programs(draw):
    num_replicas, num_places = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    num_microbatches, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rank_of = draw(st.lists(st.integers(0, ranks - 1), min_size=num_places, max_size=num_places))
    grouped = draw(st.booleans())
    stages = [
        Stage(replica * ranks + rank_of[place], f"module {place}", place if grouped else -1)
        for replica in range(num_replicas)
        for place in range(num_places)
    ]
    pairs = [(low, high) for high in range(num_places) for low in range(high)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    made = [list(passes(draw, place, num_microbatches)) for place in range(num_places)]
    actions = [action for of in made for action in (*of, *collectives(draw, of, num_microbatches))]
    for edge in chosen:
        actions += moves(draw, edge, made, num_microbatches)
    shift = range(0, num_replicas * num_places, num_places)
    everywhere = [
        action._replace(stage=action.stage + by, peer=action.peer + by if action.peer >= 0 else -1)
        for by in shift
        for action in actions
    ]
    for kind in (Kind.NORM, Kind.STEP):
        if draw(st.booleans()):
            everywhere += {stage.rank: Action(number, kind) for number, stage in enumerate(stages)}.values()
    edges = tuple((source + by, sink + by) for by in shift for source, sink in chosen)
    program = Program(tuple(stages), edges, ((),) * (num_replicas * ranks), num_microbatches)
    seed = draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    luck = defaultdict(rng.random)
    return ordered(program, everywhere, key=luck.__getitem__)


def slices_of(number, rng):
    """Parts of which every other one is tensor-parallel communication, or none is."""
    streams = (
        [("compute", "tensor")[part % 2] for part in range(number)] if rng.random() < 0.5 else ["compute"] * number
    )
    weights = rng.random(number)
    totals = {stream: sum(weight for weight, of in zip(weights, streams) if of == stream) for stream in streams}
    return tuple(Part(weight / totals[stream], stream) for weight, stream in zip(weights, streams))


@st.composite
def times_of(draw, program):
    """Random tables of the program's shapes, with said parts for some stages."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    stages, edges = (program.num_stages, program.num_microbatches), (len(program.edges), program.num_microbatches)
    whole = draw(st.booleans())
    count = defaultdict(int)
    for row in program.actions:
        for action in row:
            if action.microbatch == 0 and action.part >= 0:
                count[action.stage, action.kind] += 1
    parts = [
        {stage: slices_of(number, rng) for (stage, of), number in count.items() if of in kinds and not whole}
        for kinds in ((Kind.F,), (Kind.B, Kind.I))
    ]
    return StageTimes(
        rng.random(stages),
        rng.random(stages),
        rng.random(stages),
        rng.random(stages),
        rng.random(stages) * draw(st.booleans()),
        rng.random(stages) * draw(st.booleans()),
        rng.random(edges),
        rng.random(edges),
        rng.random(edges),
        rng.random(program.num_stages),
        rng.random(program.num_stages),
        rng.random(program.num_stages),
        rng.random(program.num_ranks),
        rng.random(program.num_ranks),
        *parts,
    )
