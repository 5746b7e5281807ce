import numpy as np
import pytest

from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.simulate.placement import draw_batch, place

LINK = Link(1e9, 1e-5)
CLUSTER = Cluster(Device("test", {"bf16": 1e12}, 1 << 30, 1e12), 1, 16, LINK, LINK)
LAYER = Layer("attention", 100, 100, output_width=10, saved_width=40, attention=Attention(10, 10))
MODEL = ModelSpec(
    "tiny",
    (
        Module("image", (Stack(LAYER, 2),)),
        Module("audio", (Stack(LAYER, 2),), padded=True),
        Module("backbone", (Stack(LAYER, 4),)),
    ),
    (("image", "backbone"), ("audio", "backbone")),
)


def seconds(module, lengths):
    return float(lengths.sum()) * {"image": 2e-6, "audio": 1e-6, "backbone": 4e-6}[module]


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


def apart(encoder_dp, backbone_dp, batch_size, microbatch_size=1):
    units = (
        Unit("image", ({"image": 2},), dp=encoder_dp),
        Unit("audio", ({"audio": 2},), dp=encoder_dp, first_rank=encoder_dp),
        Unit("backbone", ({"backbone": 4},), dp=backbone_dp, first_rank=2 * encoder_dp),
    )
    return Plan(MODEL, CLUSTER, units, batch_size, microbatch_size)


def test_examples_come_microbatch_by_microbatch_and_replica_by_replica():
    placement = place(apart(2, 2, 12, 3), lengths(12), seconds, LINK, 2)
    assert placement.num_microbatches == 2
    assert placement.items["backbone"].replica.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert placement.items["backbone"].microbatch.tolist() == [0] * 6 + [1] * 6
    images = placement.items["image"]
    np.testing.assert_array_equal(images.replica, placement.items["backbone"].replica[images.example])


@pytest.mark.parametrize("balance", ["joint", "per_phase", "auto"])
def test_colocated_phases_are_balanced_in_every_microbatch(balance):
    batch = lengths(48)
    off, placed = (place(colocated(way), batch, seconds, LINK, 2) for way in ("off", balance))
    assert placed.num_microbatches == len(placed.method) == 2

    def worst(placement, module):
        items = placement.items[module]
        loads = np.bincount(items.microbatch * 4 + items.replica, items.length, 8).reshape(2, 4)
        return (loads.max(axis=1) / loads.mean(axis=1)).max()

    for module in ("image", "backbone"):
        assert worst(placed, module) < 1.15 < worst(off, module)
    np.testing.assert_array_equal(placed.items["image"].microbatch, off.items["image"].microbatch)
    if balance == "joint":
        assert set(placed.method) == {"joint"}
        assert not placed.exchanged_rows("image").any()
    if balance == "per_phase":
        assert placed.exchanged_rows("image").all()


def test_exchanged_rows_are_those_of_the_busiest_replica():
    placement = place(colocated("off"), lengths(48), seconds, LINK, 2)
    placement.items["image"].replica[:] = 0
    images = placement.items["image"]
    home = placement.items["backbone"].replica[images.example]
    expected = [images.num_tokens[(home != 0) & (images.microbatch == m)].sum() for m in range(2)]
    assert placement.exchanged_rows("image").tolist() == expected


@pytest.mark.parametrize(("encoder_dp", "backbone_dp"), [(1, 4), (2, 4), (2, 3), (4, 2), (3, 1)])
def test_replicas_of_other_units_share_the_examples_of_their_island(encoder_dp, backbone_dp):
    plan = apart(encoder_dp, backbone_dp, batch_size=24 * backbone_dp, microbatch_size=12)
    placement = place(plan, lengths(24 * backbone_dp), seconds, LINK, 2)
    backbone, images = placement.items["backbone"], placement.items["image"]
    islands = np.gcd(encoder_dp, backbone_dp)
    np.testing.assert_array_equal(
        images.replica // (encoder_dp // islands), backbone.replica[images.example] // (backbone_dp // islands)
    )
    share = {}
    for example, replica in zip(images.example.tolist(), images.replica.tolist()):
        share.setdefault(replica, set()).add(example)
    assert sorted(share) == list(range(encoder_dp))


def test_a_workload_without_a_modules_lengths_is_refused():
    plan, batch = apart(2, 2, 12, 3), lengths(30)
    drawn = draw_batch(plan, Workload("table.csv", batch), np.random.default_rng(0))
    assert drawn.num_examples == 12
    empty = ItemLengths(*(np.zeros(0, np.int64) for _ in range(3)))
    lacking = BatchLengths(batch.sequence, batch.num_targets, batch.home, {**batch.items, "audio": empty})
    with pytest.raises(UserError, match=r"'audio' needs lengths, but table.csv has none"):
        draw_batch(plan, Workload("table.csv", lacking), np.random.default_rng(0))
