"""Programs for property tests: the generators', and GPipe on any graph of stages spread over ranks."""

from hypothesis import strategies as st

from motet.schedule import Action, Kind, Program, Stage, gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v


def dag(stage_ranks, edges, num_microbatches, frozen=()):
    """All forward passes, then all backward passes, of stages in their order."""
    num_ranks = max(stage_ranks) + 1
    rows = [[] for _ in range(num_ranks)]
    for microbatch in range(num_microbatches):
        for stage, rank in enumerate(stage_ranks):
            rows[rank].append(Action(stage, Kind.F, microbatch))
    for microbatch in range(num_microbatches):
        for stage, rank in reversed(list(enumerate(stage_ranks))):
            if stage not in frozen:
                rows[rank].append(Action(stage, Kind.B, microbatch))
    stages = tuple(Stage(rank) for rank in stage_ranks)
    return Program(stages, tuple(edges), tuple(map(tuple, rows)), num_microbatches)


@st.composite
def dags(draw):
    stage_ranks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    stage_ranks = [sorted(set(stage_ranks)).index(rank) for rank in stage_ranks]
    pairs = [(source, sink) for sink in range(len(stage_ranks)) for source in range(sink)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    frozen = {0} if draw(st.booleans()) and len(stage_ranks) > 1 else ()
    return dag(stage_ranks, edges, draw(st.integers(1, 4)), frozen)


def chains():
    counts = st.tuples(st.integers(1, 4), st.integers(1, 6))
    interleaved = st.builds(
        interleaved_1f1b, st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), deferred_warmup=st.booleans()
    )
    return interleaved | st.builds(
        lambda schedule, sizes: schedule(*sizes), st.sampled_from([gpipe, one_f_one_b, zb_h1, zb_v]), counts
    )


def programs():
    return chains() | dags()
