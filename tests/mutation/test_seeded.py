"""The fuzzer sees faults that nothing else does: its comparison with one process finds each that is put in."""

import inspect

import pytest

from motet.core.plan import Unit
from mutation import seeded
from mutation.running import recomputed_errors, run_faulty
from parity.drawn_plans import draw
from parity.planned import LOOSEST, TOLERANCE, PlannedCase
from ranks import run_ranks

AMPLIFYING = (0, 1269)
"""Seed and number of a case of the fuzzer whose model multiplies a rounding beyond TOLERANCE."""
CUT = ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2})
RECOMPUTED = PlannedCase(
    (Unit("all", CUT, pp=2, zero=0, recompute=({"image": 2, "audio": 2}, {"backbone": 1})),), contents=("audio",)
)
CHAIN = PlannedCase((Unit("all", CUT, pp=2, zero=0),), "gpipe", tied=True)
ENCODERS_APART = PlannedCase(
    (Unit("image", ({"image": 3},), zero=0), Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=1, zero=0)), "gpipe"
)
REPLICAS = PlannedCase((Unit("all", ({"image": 3, "audio": 2, "backbone": 3},), dp=2, zero=0),), "gpipe")
SHARDS = PlannedCase((Unit("all", ({"image": 3, "audio": 2, "backbone": 3},), dp=2, zero=1),), "gpipe")
CHUNKS = PlannedCase((Unit("all", ({"image": 3, "audio": 2, "backbone": 3},), tp=2, zero=0),), "gpipe", chunks=2)
SEEN_IN = {
    "": [CHAIN, ENCODERS_APART, REPLICAS, SHARDS, CHUNKS, draw(*AMPLIFYING).case],
    "a_message_is_lost": [CHAIN],
    "a_receive_buffer_is_stale": [CHAIN],
    "rows_are_in_another_order": [ENCODERS_APART],
    "microbatches_are_swapped": [CHAIN],
    "no_gradient_comes_back": [CHAIN],
    "a_gradient_of_sent_rows_is_dropped": [CHAIN],
    "tied_embeddings_are_not_summed": [CHAIN],
    "a_stage_is_not_stepped": [CHAIN],
    "the_optimizer_steps_twice": [CHAIN],
    "gradients_are_not_zeroed": [CHAIN],
    "a_gradient_is_off_by_a_millionth": [CHAIN, draw(*AMPLIFYING).case],
    "sums_are_means": [REPLICAS],
    "a_reduction_is_missed": [REPLICAS],
    "an_empty_microbatch_skips_the_reduction": [REPLICAS],
    "the_loss_is_divided_by_own_targets": [REPLICAS],
    "copies_count_twice_in_the_norm": [REPLICAS],
    "shards_are_not_gathered_anew": [SHARDS],
    "rows_of_chunks_stay_as_they_came": [CHUNKS],
}
"""Fault -> cases in which it is seen; "" is none."""
OF_RECOMPUTATION = "recomputation_draws_other_numbers"


def test_every_fault_is_put_in():
    faults = {
        name
        for name, function in inspect.getmembers(seeded, inspect.isfunction)
        if function.__module__ == seeded.__name__ and [*inspect.signature(function).parameters] == ["patch"]
    }
    assert faults == {*SEEN_IN, OF_RECOMPUTATION} - {""}
    assert len(faults) >= 12


@pytest.mark.slow
def test_the_comparison_sees_every_fault():
    put_in = [(name, case) for name, cases in SEEN_IN.items() for case in cases]
    by_rank = run_ranks(run_faulty, 2, put_in)
    # How far it amplifies is the kernels' of this machine.
    assert TOLERANCE <= by_rank[0][SEEN_IN[""].index(draw(*AMPLIFYING).case)].tolerance <= LOOSEST
    unseen = [
        name
        for (name, _), of_ranks in zip(put_in, zip(*by_rank), strict=True)
        if any(each.wrong for each in of_ranks) != bool(name)
    ]
    assert not unseen


@pytest.mark.parametrize("fault", ["", OF_RECOMPUTATION])
def test_what_is_recomputed_draws_the_same_numbers(fault):
    """Without keys of items torch's generators draw: this is held against the same Plan without recomputation."""
    errors = run_ranks(recomputed_errors, 2, RECOMPUTED, fault)
    assert (max(errors) > TOLERANCE) == bool(fault)
