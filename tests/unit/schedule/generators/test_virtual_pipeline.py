"""Units around a backbone that interleaves chunks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.schedule import add_communication, interleaved_1f1b, validate
from motet.schedule.generators.disaggregated import Pipeline, UnitEdge, island
from motet.schedule.generators.virtual_pipeline import virtual_pipeline
from motet.schedule.program import Kind
from unit.schedule.longest_path import ends


def made(before, after, num_ranks, num_chunks, num_microbatches, dps=(1, 1, 1), learns=True):
    """An encoder of some stages, a backbone and a generator, by replicas; 0 stages: there is none."""
    units = [Pipeline(("backbone",) * (num_ranks * num_chunks), dps[1])]
    feeds = []
    for number, place in ((before, 0), (after, 2)):
        if number:
            units.append(Pipeline(("other",) * number, dps[place]))
            feeds.append(UnitEdge(len(units) - 1, 0) if place == 0 else UnitEdge(0, len(units) - 1))
    whole = island(units, feeds)
    ranks, chunked, first = [], [], 0
    for place, (unit, replicas) in enumerate(zip(units, whole.num_replicas)):
        for _ in range(replicas):
            own = num_ranks if place == 0 else len(unit.modules)
            if place == 0:
                chunked.append(range(len(ranks), len(ranks) + len(unit.modules)))
            ranks += [first + stage % own for stage in range(len(unit.modules))]
            first += own
    flags = [learns or stage.module == "backbone" for stage in whole.stages] if not after else None
    return virtual_pipeline(whole, ranks, chunked, num_microbatches, flags)


SIZES = st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 3, 1), (1, 2, 4)])


@given(st.integers(0, 3), st.integers(0, 4), st.integers(2, 5), st.integers(2, 4), st.integers(1, 13), SIZES)
@settings(max_examples=60)
def test_no_rank_waits_for_ever(before, after, num_ranks, num_chunks, num_microbatches, dps):
    validate(add_communication(made(before, after, num_ranks, num_chunks, num_microbatches, dps)))


def test_frozen_encoders_run_ahead():
    program = made(2, 0, 3, 2, 6, learns=False)
    validate(add_communication(program))
    assert not any(a.kind is Kind.B and a.stage >= 6 for row in program.actions for a in row)


def test_alone_it_is_interleaved_1f1b():
    program, lone = made(0, 0, 4, 3, 8), interleaved_1f1b(4, 3, 8)
    assert program.actions == lone.actions


def test_chunks_divide_the_time_until_the_pipeline_is_full():
    """Stages of the units around take half as long as a rank of the backbone."""

    def idle(num_chunks, num_microbatches=16):
        program = made(1, 1, 4, num_chunks, num_microbatches)

        def seconds(action):
            return (1 if action.kind is Kind.F else 2) * (1 if action.stage < 4 * num_chunks else num_chunks / 2)

        return max(ends(program, seconds).values()) / num_chunks - num_microbatches * 3

    plain = (4 - 1 + 2 / 2) * 3
    assert idle(2) <= 0.6 * plain
    assert idle(2) == idle(2, num_microbatches=64)
