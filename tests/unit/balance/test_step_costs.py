"""From lengths to phases: the backbone first, work as it was counted, seconds and bytes of each."""

import numpy as np

from motet.balance import LengthWork, Link, Packed, Padded, PhaseCosts, StepCosts, StepTimes
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths

SEQUENCE = np.array([9, 4, 7])
IMAGES = ItemLengths(np.array([0, 0, 2]), np.array([5, 8, 3]), np.array([2, 4, 1]))
CLIPS = ItemLengths(np.array([1]), np.array([20]), np.array([3]))
BATCH = BatchLengths(SEQUENCE, SEQUENCE // 2, np.zeros(3, np.int32), {"image": IMAGES, "audio": CLIPS})
COSTS = {"image": Packed(), "audio": Padded(), BACKBONE: Packed(linear=2, quadratic=1)}
UNIT_S = {BACKBONE: 3.0, "image": 2.0, "audio": 1.0}
TIMES = StepTimes(lambda _: UNIT_S, Link(1e9, 0.0), token_bytes=10, frozen=frozenset({"audio"}))


def test_phases_are_those_of_the_costs_with_the_backbone_first():
    backbone, image, audio = StepCosts(COSTS, LengthWork(), TIMES).phases(BATCH)
    assert [phase.name for phase in (backbone, image, audio)] == [BACKBONE, "image", "audio"]
    assert (backbone.lengths.tolist(), backbone.owner.tolist()) == ([9, 4, 7], [0, 1, 2])
    assert backbone.cost == Packed(linear=2, quadratic=1) and backbone.output_bytes is None
    assert (image.lengths.tolist(), image.owner.tolist()) == ([5, 8, 3], [0, 0, 2])
    assert (image.output_bytes.tolist(), audio.output_bytes.tolist()) == ([20, 40, 10], [30])
    assert (image.num_exchanges, audio.num_exchanges) == (2, 1), "nothing comes back to what is frozen"
    assert [phase.seconds_per_cost for phase in (backbone, image, audio)] == [3.0, 2.0, 1.0]


def test_work_that_was_counted_is_taken():
    work = {BACKBONE: np.array([1, 2, 3]), "image": np.array([4, 5, 6]), "audio": np.array([7])}
    phases = StepCosts(COSTS, LengthWork(), TIMES).phases(BATCH, work)
    assert [phase.lengths.tolist() for phase in phases] == [[1, 2, 3], [4, 5, 6], [7]]


def test_loads_are_named_after_the_work_unless_coefficients_weigh_it_anew():
    costs = PhaseCosts(COSTS, LengthWork({"image": "patches"}))
    assert {phase: costs.unit(phase) for phase in costs.names} == {
        BACKBONE: "cost",
        "image": "patches",
        "audio": "length",
    }
    assert PhaseCosts({BACKBONE: Packed()}, LengthWork()).unit(BACKBONE) == "tokens"
