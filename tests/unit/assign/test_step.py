from dataclasses import replace

import numpy as np
import pytest

from motet.assign.balancing import by_operations
from motet.assign.plan import assign_step
from motet.assign.step import joined
from motet.balance.scoring import scored
from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import ArgumentError
from motet.core.plan import Plan, Unit
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.analytic import Analytic
from motet.cost.operations import Operations
from motet.schedule import Kind, planned, program_of_batch, validate
from motet.schedule.program import EXCHANGES
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate import jobs
from unit.simulate.jobs import PLANS

LINK = Link(1e9, 1e-5)
CLUSTER = Cluster(Device("test", {"bf16": 1e12}, 1 << 30, 1e12), 1, 16, LINK, LINK)
LAYER = Layer("attention", 100, 100, output_width=10, activation_width=40, attention=Attention(10, 10))
MODEL = ModelSpec(
    "tiny",
    (
        Module("image", (Stack(LAYER, 2),)),
        Module("audio", (Stack(LAYER, 2),), padded=True),
        Module("backbone", (Stack(LAYER, 4),)),
    ),
    (("image", "backbone"), ("audio", "backbone")),
)


def lengths(num_examples, seed=0):
    rng = np.random.default_rng(seed)
    items = {}
    for name in ("image", "audio"):
        example = np.flatnonzero(rng.random(num_examples) < 0.6)
        length = rng.integers(10, 500, len(example))
        items[name] = ItemLengths(example, length, length // 4 + 1)
    sequence = rng.integers(20, 900, num_examples)
    return BatchLengths(sequence, sequence // 2, np.zeros(num_examples, np.int32), items)


def colocated(balance, dp=4):
    unit = Unit("all", ({"image": 2, "audio": 2, "backbone": 4},), dp=dp)
    return Plan(MODEL, CLUSTER, (unit,), 48, 6, "data_parallel", balance=balance)


def as_they_come(plan):
    """Costs by which no example changes its microbatch."""
    return replace(by_operations(plan), defers=False)


def apart(encoder_dp, backbone_dp, batch_size, microbatch_size=1):
    units = (
        Unit("image", ({"image": 2},), dp=encoder_dp),
        Unit("audio", ({"audio": 2},), dp=encoder_dp, first_rank=encoder_dp),
        Unit("backbone", ({"backbone": 4},), dp=backbone_dp, first_rank=2 * encoder_dp),
    )
    return Plan(MODEL, CLUSTER, units, batch_size, microbatch_size)


def test_examples_come_microbatch_by_microbatch_and_replica_by_replica():
    assignment = assign_step(apart(2, 2, 12, 3), lengths(12))
    assert assignment.num_microbatches == 2
    assert assignment.modules["backbone"].replica.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert assignment.modules["backbone"].microbatch.tolist() == [0] * 6 + [1] * 6
    images = assignment.modules["image"]
    np.testing.assert_array_equal(images.replica, assignment.modules["backbone"].replica[images.example])


@pytest.mark.parametrize("balance", ["joint", "per_phase", "auto"])
def test_colocated_phases_are_balanced_in_every_microbatch(balance):
    batch = lengths(48)
    off, placed = (assign_step(colocated(way), batch, as_they_come) for way in ("off", balance))
    assert placed.num_microbatches == len(placed.methods) == 2

    work = Operations(MODEL)(batch)

    def worst(assignment, module):
        items = assignment.modules[module]
        loads = np.bincount(items.microbatch * 4 + items.replica, work[module], 8).reshape(2, 4)
        return (loads.max(axis=1) / loads.mean(axis=1)).max()

    for module in ("image", "backbone"):
        assert worst(placed, module) < 1.15 < worst(off, module)
    np.testing.assert_array_equal(placed.modules["image"].microbatch, off.modules["image"].microbatch)
    if balance == "joint":
        assert set(placed.methods) == {"joint"}
        assert not placed.exchanged_rows("image").any()
    if balance == "per_phase":
        assert placed.exchanged_rows("image").all()


def test_long_examples_of_a_step_share_a_microbatch():
    batch = lengths(48)
    batch.sequence[[3, 30]] = 9000  # one in each of the two microbatches
    stay, deferred = (assign_step(colocated("joint"), batch, costs) for costs in (as_they_come, by_operations))
    work = Operations(MODEL)

    def step_flops(assignment):
        items = assignment.modules["backbone"]
        index = items.microbatch * 4 + items.replica
        loads = np.bincount(index, work(assignment.batch)["backbone"], 8).reshape(2, 4)
        return loads.max(axis=1).sum()

    long = deferred.modules["backbone"].length == 9000
    assert len(set(deferred.modules["backbone"].microbatch[long])) == 1
    assert sorted(deferred.modules["backbone"].length) == sorted(stay.modules["backbone"].length)
    assert step_flops(deferred) < 0.7 * step_flops(stay)
    assert deferred.num_microbatches == 2


@pytest.mark.parametrize("balance", ["off", "joint", "auto"])
def test_lengths_of_what_the_model_lacks_change_nothing(balance):
    made, batch = colocated(balance), lengths(48)
    spec = ModelSpec("less", (MODEL.modules[0], MODEL.modules[2]), MODEL.edges[:1])
    made = replace(made, model=spec, units=(Unit("all", ({"image": 2, "backbone": 4},), dp=4),))
    found = assign_step(made, batch)
    expected = assign_step(made, replace(batch, items={"image": batch.items["image"]}))
    assert list(found.modules) == ["image", "backbone"]
    for name, items in found.modules.items():
        np.testing.assert_array_equal(items.replica, expected.modules[name].replica)


def test_exchanged_rows_are_those_of_the_busiest_replica():
    assignment = assign_step(colocated("off"), lengths(48))
    assignment.modules["image"].replica[:] = 0
    images = assignment.modules["image"]
    home = assignment.modules["backbone"].replica[images.example]
    expected = [images.num_tokens[(home != 0) & (images.microbatch == m)].sum() for m in range(2)]
    assert assignment.exchanged_rows("image").tolist() == expected


@pytest.mark.parametrize(("encoder_dp", "backbone_dp"), [(1, 4), (2, 4), (2, 3), (4, 2), (3, 1)])
def test_replicas_of_other_units_share_the_examples_of_their_island(encoder_dp, backbone_dp):
    plan = apart(encoder_dp, backbone_dp, batch_size=24 * backbone_dp, microbatch_size=12)
    assignment = assign_step(plan, lengths(24 * backbone_dp))
    backbone, images = assignment.modules["backbone"], assignment.modules["image"]
    islands = np.gcd(encoder_dp, backbone_dp)
    np.testing.assert_array_equal(
        images.replica // (encoder_dp // islands), backbone.replica[images.example] // (backbone_dp // islands)
    )
    share = {}
    for example, replica in zip(images.example.tolist(), images.replica.tolist()):
        share.setdefault(replica, set()).add(example)
    assert sorted(share) == list(range(encoder_dp))


@pytest.mark.parametrize(("encoder_dp", "backbone_dp", "size"), [(2, 3, 1), (8, 1, 1), (3, 2, 2), (5, 2, 1)])
def test_replicas_that_do_not_divide_the_examples_share_items(encoder_dp, backbone_dp, size):
    """Every example has four images: each replica gets as many as the others, give or take one an example."""
    plan = apart(encoder_dp, backbone_dp, batch_size=2 * backbone_dp * size, microbatch_size=size)
    num = plan.batch_size
    images = ItemLengths(np.repeat(np.arange(num), 4), np.full(4 * num, 8), np.full(4 * num, 2))
    batch = BatchLengths(np.full(num, 9), np.ones(num, int), np.zeros(num, np.int32), {"image": images})
    batch = replace(batch, items={"image": images, "audio": images})
    found = assign_step(plan, batch).modules["image"]
    for microbatch in range(2):
        counts = [len(found.items_of(replica, microbatch)) for replica in range(encoder_dp)]
        assert sum(counts) == 4 * backbone_dp * size
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("name", PLANS)
def test_positions_count_the_items_of_a_replica_and_microbatch(name):
    made = replace(PLANS[name], batch_size=48)
    assignment = assign_step(made, jobs.lengths(48))
    for items in assignment.modules.values():
        seen = 0
        for replica in range(items.num_replicas):
            for microbatch in range(assignment.num_microbatches):
                own = items.items_of(replica, microbatch)
                assert items.position[own].tolist() == list(range(len(own)))
                assert own.tolist() == sorted(own.tolist())  # as they come
                seen += len(own)
        assert seen == len(items.example)


def test_what_was_decided_elsewhere_is_placed_as_it_is():
    microbatches = [lengths(12, seed=seed) for seed in (1, 2)]
    rng = np.random.default_rng(3)
    decided = []
    for part in microbatches:
        columns = {"image": part.items["image"].length, "audio": part.items["audio"].length, "backbone": part.sequence}
        decided.append(
            {name: scored(rng.integers(0, 4, len(column), np.int32), column, 4) for name, column in columns.items()}
        )
    assignment = joined(microbatches, decided)
    assert (assignment.num_microbatches, assignment.batch.num_examples) == (2, 24)
    for name, items in assignment.modules.items():
        assert items.num_replicas == 4
        for number, (part, assigned) in enumerate(zip(microbatches, decided, strict=True)):
            own = items.microbatch == number
            np.testing.assert_array_equal(items.replica[own], assigned[name].ranks)
            column = part.sequence if name == "backbone" else part.items[name].length
            np.testing.assert_array_equal(items.length[own], column)
            if name != "backbone":
                np.testing.assert_array_equal(items.example[own], part.items[name].example + 12 * number)
    made = sharded("per_phase")
    stages = planned(made)
    pricing = Pricing(made, stages, assignment, Analytic(CLUSTER, "bf16"))
    for stage in stages.stages:
        (name,) = stage.modules
        rows = pricing.rows(name, LAYER, stage, [0])[0]
        for number, assigned in enumerate(decided):
            own = columns_of(microbatches[number], name)[assigned[name].ranks == stage.replica]
            assert rows[number] == (len(own) * own.max(initial=0) if name == "audio" else own.sum())
    with pytest.raises(ArgumentError, match="2 microbatches have 1 assignments"):
        joined(microbatches, decided[:1])


def sharded(balance):
    made = colocated(balance)
    return replace(made, units=(replace(made.units[0], zero=3),))


def columns_of(part, name):
    return part.sequence if name == "backbone" else part.items[name].length


def test_an_exchange_that_moves_nothing_is_not_called():
    made = sharded("auto")
    stages = planned(made)
    batch = lengths(48)
    home = np.repeat(np.arange(4, dtype=np.int32), 6)
    still = {
        name: [scored(home[columns_home(part, name)], columns_of(part, name), 4) for part in halves(batch)]
        for name in ("image", "audio", "backbone")
    }
    moved = still["image"][1]
    still["image"][1] = scored((moved.ranks + 1) % 4, columns_of(halves(batch)[1], "image"), 4)
    assignment = joined(halves(batch), [{name: rows[i] for name, rows in still.items()} for i in range(2)])
    program = program_of_batch(stages, assignment.present)
    exchanges = [action for action in program.actions[2] if action.kind in EXCHANGES]
    assert [(program.stages[a.stage].module, a.kind, a.microbatch) for a in exchanges] == [
        ("image", Kind.EXCHANGE_F, 1),
        ("image", Kind.EXCHANGE_B, 1),
    ]
    validate(program)


def halves(batch):
    return [batch.take(np.arange(24)), batch.take(np.arange(24, 48))]


def columns_home(part, name):
    return np.arange(part.num_examples) if name == "backbone" else part.items[name].example
