"""Items of encoders on ranks of their own that replicas of their unit share, by `balance = "split"`, equal one process.

More of what they combine with: benchmarks/fuzz_plans.py.
"""

from dataclasses import replace

import pytest

from motet.assign.planned_step import decide_planned_step
from motet.core.plan import Unit
from motet.dispatch.loaded import LoadedTables, tables_of
from parity.planned import PlannedCase, assert_planned
from tiers import in_tiers

LLM = Unit("llm", ({"backbone": 3},))
TWO = replace(LLM, dp=2)
IN_TWO = Unit("llm", ({"backbone": 2}, {"backbone": 1}), pp=2)
ENCODERS = {"image": 3, "audio": 2}
WITH_QUERIES = {"image": 4, "audio": 3}


def beside(backbone, *units, schedule="1f1b", batch_size=8, microbatch_size=2, **options):
    """A case whose encoders stand behind the ranks of the backbone's unit."""
    first_rank, placed = backbone.num_ranks, [backbone]
    for unit in units:
        placed.append(replace(unit, first_rank=first_rank))
        first_rank += unit.num_ranks
    sizes = {"batch_size": batch_size, "microbatch_size": microbatch_size}
    return PlannedCase(tuple(placed), schedule, balance="split", has_large=True, **sizes, **options)


def encoders(dp=2, stages=(ENCODERS,), **options):
    return Unit("encoders", stages, dp=dp, pp=len(stages), **options)


IMAGE, AUDIO = Unit("image", ({"image": 3},)), Unit("audio", ({"audio": 2},))
CASES = {
    3: [
        beside(LLM, encoders(), left_out=0.3, dropout=0.2, seed=2),
        beside(LLM, encoders(zero=3, recompute=({"image": 2, "audio": 1},)), frozen=("audio",), seed=1),
        beside(LLM, encoders(zero=2), microbatch_size=4, lora=("image", "audio"), dropout=0.2, left_out=0.3, seed=3),
        beside(LLM, encoders(), frozen=("image encoder", "backbone"), seed=4, microbatch_size=4),
        beside(LLM, encoders(), parts=("tiled",), seed=1),
        beside(LLM, encoders(), parts=("lines",), seed=1),
        beside(LLM, encoders(), parts=("stacked", "ahead"), seed=1),
        beside(LLM, encoders(), parts=("keys",), microbatch_size=1, left_out=0.2, seed=1),
        beside(LLM, encoders(stages=(WITH_QUERIES,)), parts=("queries",), dropout=0.2, seed=1),
        beside(LLM, encoders(), parts=("merge", "again"), seed=1),
        beside(LLM, encoders(), example_order="both", seed=1),
        beside(LLM, encoders(), schedule="gpipe", is_mixed=True, seed=5),
        beside(LLM, encoders(), contents=("audio",), microbatch_size=1, left_out=0.3, blocking=True, seed=6),
    ],
    4: [
        beside(TWO, encoders(), microbatch_size=1, left_out=0.3, dropout=0.2, seed=1),
        beside(LLM, encoders(3), left_out=0.3, dropout=0.2, seed=2),
        beside(IN_TWO, encoders(zero=2), seed=2),
        beside(replace(LLM, cp=2), encoders(), seed=3),
        beside(LLM, replace(IMAGE, dp=2), AUDIO, seed=3, left_out=0.3),
        beside(TWO, encoders(), example_order="both", caps={"image": 40, "backbone": 120}, batch_size=12, seed=8),
    ],
    5: [
        beside(LLM, encoders(cp=2), left_out=0.3, dropout=0.2, seed=2),
        beside(LLM, encoders(cp=2), parts=("tiled",), microbatch_size=4, seed=1),
        beside(LLM, encoders(stages=(WITH_QUERIES,), cp=2), parts=("queries",), microbatch_size=4, seed=1),
        beside(LLM, encoders(cp=2), parts=("keys",), microbatch_size=1, seed=2),
        beside(LLM, encoders(stages=({"image": 2}, {"image": 1, "audio": 2})), left_out=0.3, seed=4),
        beside(LLM, encoders(tp=2), dropout=0.2, seed=5),
        beside(LLM, replace(IMAGE, dp=2), replace(AUDIO, dp=2), left_out=0.4, seed=7, batch_size=12, microbatch_size=3),
        beside(replace(TWO, dp=3), encoders(), batch_size=12, left_out=0.3, seed=6),
        beside(TWO, encoders(3), microbatch_size=1, parts=("keys",), has_long=True, seed=2),
    ],
}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {3: [0]}))
def test_items_that_replicas_share_train_as_in_one_process(num_ranks, cases):
    for case in cases:
        assert cut_items(case), case
    assert_planned(num_ranks, cases)


def cut_items(case):
    """Items that replicas share in two steps, by module and by how many ranks share them."""
    model, plan, found = case.model(), case.plan(), []
    phases = tuple(model.measured)
    for step in range(2 if case.example_order == "given" else 0):
        lengths = LoadedTables.read([tables_of(case.examples(step), phases, model.measured)], phases).lengths
        for part in decide_planned_step(plan, lengths).microbatches:
            for name in phases:
                if (cuts := part.decision.cuts_of(name)) is not None and part.decision.is_over_all(name):
                    found += [(name, degree) for degree in cuts.degrees.values()]
    return found or case.example_order != "given"
