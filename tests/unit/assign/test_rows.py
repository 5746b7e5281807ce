"""Every row of a module's output reaches the replica that takes it in, once, at its index of the input."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.assign.plan import assign_step
from motet.assign.rows import edge_rows, row_order, sent_rows, sent_shares
from motet.assign.step import joined
from motet.balance.scoring import scored
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.dispatch import compose_route
from motet.schedule import planned, validate
from motet.schedule.coordinates import replica_of
from motet.simulate.predict.predict import assign_batch
from unit.simulate.jobs import BACKBONE as HALVES
from unit.simulate.jobs import PLANS, Linear, lengths, plan


def output_of(assignment, module, replica, microbatch):
    """The output of a replica: a row is (item, number in the item)."""
    items = assignment.modules[module]
    own = [i for i in range(len(items.example)) if (items.replica[i], items.microbatch[i]) == (replica, microbatch)]
    own.sort(key=lambda i: items.position[i])
    return [(i, row) for i in own for row in range(items.num_tokens[i])]


def input_of(assignment, module, taker, replica, microbatch):
    """The rows of a module that a replica takes in: by position of the example, then item by item."""
    items, taking = assignment.modules[module], assignment.modules[taker]
    own = [i for i in range(len(taking.example)) if (taking.replica[i], taking.microbatch[i]) == (replica, microbatch)]
    own.sort(key=lambda i: taking.position[i])
    examples = list(dict.fromkeys(int(taking.example[i]) for i in own))
    return [
        (i, row)
        for example in examples
        for i in np.flatnonzero(items.example == example).tolist()
        for row in range(items.num_tokens[i])
    ]


def received(assignment, module, taker, replica, microbatch):
    """The input that the messages of all replicas make up; each index is written once."""
    found = {}
    for source in range(assignment.modules[module].num_replicas):
        rows = sent_rows(assignment, (module, source), (taker, replica), microbatch)
        output = output_of(assignment, module, source, microbatch)
        assert (np.diff(rows.sink) > 0).all()
        for source_row, sink_row in zip(rows.source.tolist(), rows.sink.tolist(), strict=True):
            assert sink_row not in found
            found[sink_row] = output[source_row]
    return [found[place] for place in range(len(found))]


def check(assignment, module, taker):
    for microbatch in range(assignment.num_microbatches):
        for replica in range(assignment.modules[taker].num_replicas):
            expected = input_of(assignment, module, taker, replica, microbatch)
            assert received(assignment, module, taker, replica, microbatch) == expected


@pytest.mark.parametrize("order", ["given", "both"])
@pytest.mark.parametrize("name", [name for name in PLANS if name != "data parallel"])
def test_rows_reach_the_replica_of_their_example(name, order):
    made = replace(PLANS[name], order=order, batch_size=48)
    assignment = assign_batch(made, lengths(48), Linear(made.cluster))
    for module, taker in made.model.edges:
        check(assignment, module, taker)


def by_chance(num_examples, num_ranks, seed):
    """Two microbatches, everything on any rank, in any order."""
    parts, rng = [lengths(num_examples, seed), lengths(num_examples, seed + 1)], np.random.default_rng(seed)
    decided = []
    for part in parts:
        own = {}
        for name in ("image", "audio", BACKBONE):
            column = part.of(name).length
            placed = scored(rng.integers(0, num_ranks, len(column), np.int32), column, num_ranks)
            on_ranks = [rng.permutation(placed.on_rank(rank)) for rank in range(num_ranks)]
            own[name] = replace(placed, items=np.concatenate(on_ranks))
        decided.append(own)
    return parts, decided


@given(num_examples=st.integers(1, 12), num_ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_of_items_that_lie_anywhere(num_examples, num_ranks, seed):
    parts, decided = by_chance(num_examples, num_ranks, seed)
    assignment = joined(parts, decided)
    for module in ("image", "audio"):
        check(assignment, module, BACKBONE)
        for microbatch, (part, own) in enumerate(zip(parts, decided)):
            for rank in range(num_ranks):
                route = compose_route(own[module], own[BACKBONE], part.items[module], rank)
                leaving = [sent_rows(assignment, (module, rank), (BACKBONE, to), microbatch) for to in range(num_ranks)]
                coming = [sent_rows(assignment, (module, of), (BACKBONE, rank), microbatch) for of in range(num_ranks)]
                assert route.send_splits == [len(rows.source) for rows in leaving]
                assert route.recv_splits == [len(rows.sink) for rows in coming]
                sent = np.concatenate([rows.source for rows in leaving])
                arrived = np.argsort(np.concatenate([rows.sink for rows in coming]))
                assert sent.tolist() == in_full(route.send_index, len(sent))
                assert arrived.tolist() == in_full(route.recv_index, len(arrived))


def in_full(index, count):
    return list(range(count)) if index is None else index.tolist()


@pytest.mark.parametrize("name", PLANS)
def test_the_edges_of_a_program_carry_all_rows_of_what_they_join(name):
    made = replace(PLANS[name], batch_size=48)
    found, assignment = planned(made), assign_batch(made, lengths(48), Linear(made.cluster))
    carried = dict.fromkeys(made.model.edges, 0)
    for edge in range(len(found.program.edges)):
        for island in range(found.layout.num_islands):
            for microbatch in range(assignment.num_microbatches):
                for ends, rows in edge_rows(found, assignment, edge, island, microbatch).items():
                    takes = microbatch in found.stages[found.program.edges[edge][0]].microbatches
                    if rows is None:
                        assert ends[0] == ends[1]
                    elif takes:
                        carried[ends] += len(rows.source)
    for (module, taker), num_rows in carried.items():
        inside = any({module, taker} <= set(stage.modules) for stage in found.stages)
        assert num_rows == (0 if inside else assignment.modules[module].num_tokens.sum())


def test_an_edge_of_two_units_carries_what_both_ends_share():
    made = plan(
        Unit("image", ({"image": 4},), dp=2),
        Unit("audio", ({"audio": 3},), first_rank=2),
        Unit("llm", HALVES, first_rank=3, dp=4, pp=2),
        microbatch_size=2,
    )
    found, assignment = planned(made), assign_step(made, lengths())
    images = [
        (number, ends) for number, ends in enumerate(found.program.edges)
        if found.stages[ends[0]].unit.name == "image"
    ]  # fmt: skip
    assert len(images) == 4
    for number, ends in images:
        rows = edge_rows(found, assignment, number, 0, 1)["image", BACKBONE]
        items = assignment.modules["image"]
        source, sink = (found.stages[end].replica for end in ends)
        shared = (items.replica == source) & (assignment.modules[BACKBONE].replica[items.example] == sink)
        assert len(rows.source) == items.num_tokens[shared & (items.microbatch == 1)].sum()


@given(st.tuples(*[st.integers(1, 6)] * 3), st.integers(1, 3), st.sampled_from(["given", "both"]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_units_of_any_sizes_send_all_rows_along_edges(sizes, microbatch_size, order, in_groups):
    """Whatever number of examples a microbatch has: what the edges carry is all that each replica takes in."""
    image, audio, llm = sizes
    made = plan(
        Unit("image", ({"image": 4},), dp=image),
        Unit("audio", ({"audio": 2}, {"audio": 1}), first_rank=image, pp=2, dp=audio),
        Unit("llm", HALVES, first_rank=image + 2 * audio, dp=llm, pp=2),
        microbatch_size=microbatch_size,
        batch_size=2 * llm * microbatch_size,
        microbatch_caps={"image": 60, "backbone": 200} if in_groups else {},
        order="given" if in_groups else order,
    )
    found, assignment = planned(made), assign_batch(made, lengths(made.batch_size), Linear(made.cluster))
    validate(found.program)
    carried = Counter()
    for edge, (source, sink) in enumerate(found.program.edges):
        for island in range(found.layout.num_islands):
            share = {}
            for microbatch in range(2):
                for (name, taker), rows in edge_rows(found, assignment, edge, island, microbatch).items():
                    carried[name, taker] += 0 if rows is None else len(rows.source)
                    share[name, taker] = [*share.get((name, taker), []), 0 if rows is None else len(rows.source)]
            if found.stages[source].unit is not found.stages[sink].unit:
                ends = [replica_of(found.layout, found.stages[end], island) for end in (source, sink)]
                for (name, taker), counts in share.items():
                    items = assignment.modules[name]
                    own = [items.num_tokens[items.items_of(ends[0], microbatch)].sum() for microbatch in range(2)]
                    receiver = replica_of(found.layout, found.stages[sink], 0)
                    shares = sent_shares(assignment, name, taker, receiver, found.layout.num_islands)
                    np.testing.assert_allclose(shares[ends[0]] * own, counts)
    for name in ("image", "audio"):
        assert carried[name, BACKBONE] == assignment.modules[name].num_tokens.sum()
        check(assignment, name, BACKBONE)


def test_row_order_takes_some_items_in_any_order():
    rows = np.array([2, 1, 3, 1])
    assert row_order(np.array([3, 0, 2]), np.array([2, 3]), rows).tolist() == [3, 4, 5, 0]
