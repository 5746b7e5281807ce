"""Plans with stages that cut sequences over replicas of the backbone equal one process.

More of what they combine with: benchmarks/fuzz_plans.py.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from motet.assign.taken_rows import merge_moves
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.dispatch.context import ContextShare
from motet.runtime.sharded_state import SAME_TYPES
from parity.collectives import on_all_ranks
from parity.planned import PlannedCase, assert_planned, run_of
from ranks import run_ranks
from tiers import in_tiers

WHOLE = {"image": 3, "audio": 2, "backbone": 3}
FEW_CUTS = {"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2}
IN_A_V = {"image": 2}, {"image": 1, "audio": 2}, {"backbone": 2}, {"backbone": 1}
LLM = {"backbone": 2}, {"backbone": 1}
BESIDE = Unit("encoders", ({"image": 3, "audio": 2},), dp=2, first_rank=2)
ONE_BESIDE = Unit("encoders", ({"image": 3, "audio": 2},), first_rank=2)
ONE_BESIDE_THREE = replace(ONE_BESIDE, first_rank=3)
MAKING = Unit("made", ({"draw": 1, "recall": 1},), first_rank=2)
MADE = WHOLE | {"draw": 1, "recall": 1}
AUDIO_BESIDE = Unit("audio", ({"audio": 2},), first_rank=4)
CAPS = {"image": 25, "backbone": 120}
MORE_BESIDE = Unit("encoders", ({"image": 3, "audio": 2},), dp=4, first_rank=2)
IN_BUBBLES = (
    Unit("image", ({"image": 2}, {"image": 1}), dp=2, pp=2),
    Unit("audio", ({"audio": 2},), dp=4),
)
APART_IN_BUBBLES = Unit("image", ({"image": 3},), dp=4), Unit("audio", ({"audio": 2},), dp=2, tp=2)
OF_UNIT = ("pp", "tp", "cp", "ep", "zero", "recompute", "replicated")


def split(*stages, schedule="1f1b", units=(), dp=2, batch_size=4, **options):
    of_unit = {"pp": len(stages)} | {name: options.pop(name) for name in OF_UNIT if name in options}
    chain = Unit("all", stages, dp=dp, **of_unit)
    return PlannedCase((chain, *units), schedule, balance="split", batch_size=batch_size, has_large=True, **options)


CASES = {
    2: [
        split(WHOLE, microbatch_size=2, left_out=0.4, dropout=0.2),
        split(WHOLE, zero=2, parts=("prefix",), tied=True, family="gemma2", seed=3),
        split(
            WHOLE, zero=3, parts=("ahead", "again"), dropout=0.2, batch_size=8, recompute=({"image": 1, "backbone": 2},)
        ),
        split({"backbone": 3}, replicated=("image", "audio"), seed=4),
        split(WHOLE, family="qwen3_moe", ep=2, seed=6, microbatch_size=2, batch_size=8),
        split(WHOLE, frozen=("image", "backbone"), parts=("again",), seed=7),
        split(WHOLE, parts=("stacked",), seed=8),
        split({"image": 2}, {"image": 1, "audio": 2, "backbone": 3}, pp=1, schedule="zb_v", seed=10),
        split(WHOLE, caps=CAPS, example_order="both", microbatch_size=2, batch_size=12, left_out=0.3, seed=3),
        split(MADE, made=("draw", "recall"), batch_size=8, left_out=0.2, seed=13),
        split(WHOLE | {"draw": 1}, made=("draw",), frozen=("draw",), batch_size=8, microbatch_size=2, seed=1),
        split(WHOLE, example_order="inter", batch_size=8, seed=2),
        # A merge of the user's own has whole sequences.
        split(WHOLE, parts=("merge", "again"), dropout=0.2, batch_size=8, left_out=0.3, seed=2),
        split(WHOLE | {"draw": 1}, parts=("merge",), made=("draw",), batch_size=8, zero=3, seed=1),
        # Rows attend to images, of which one replica of two that share a sequence has none; ranks share images, too.
        split(WHOLE, parts=("keys",), contents=("image",), microbatch_size=2, has_long=True, seed=5),
        split(WHOLE, parts=("keys", "ahead"), dropout=0.2, batch_size=8, has_long=True, left_out=0.3, seed=2),
    ],
    3: [
        split(WHOLE, dp=3, batch_size=12, left_out=0.3),
        split(WHOLE, dp=3, batch_size=6, contents=(), seed=5),
        # Other units feed replicas in common, which then meet in one island.
        split({"backbone": 3}, units=(ONE_BESIDE,), batch_size=8, left_out=0.3, seed=1),
        split(WHOLE, units=(MAKING,), made=("draw", "recall"), batch_size=8, seed=1),
    ],
    4: [
        split(*FEW_CUTS),
        split(WHOLE, tp=2, dropout=0.2),
        # Ranks of a replica share its whole sequences in the same exchange.
        split(WHOLE, cp=2, microbatch_size=2, batch_size=8),
        split(WHOLE, cp=2, parts=("ahead", "again"), dropout=0.2, seed=1),
        split(WHOLE, cp=2, family="mixtral", seed=12, ep=4),
        split({"backbone": 3}, units=(BESIDE,), seed=4, microbatch_size=2, batch_size=8, left_out=0.3),
        split({"backbone": 3}, units=(BESIDE,), parts=("merge", "stacked"), seed=4, microbatch_size=2, batch_size=8),
        split(*FEW_CUTS, schedule="zb_h1", seed=5, batch_size=8),
        split(*FEW_CUTS, schedule="gpipe", seed=6, recompute=({"image": 1, "backbone": 1}, {"backbone": 1})),
        split(*IN_A_V, schedule="interleaved_1f1b", pp=2, seed=8, batch_size=8),
        split(*LLM, units=IN_BUBBLES, seed=10, batch_size=8, fill_seed=3),
        split({"backbone": 3}, tp=2, units=APART_IN_BUBBLES, seed=11, batch_size=8),
        split(*LLM, replicated=("image", "audio"), seed=13, is_mixed=True, blocking=True),
        split(*LLM, units=IN_BUBBLES, seed=10, batch_size=8, fill_seed=3, filling="by_step", example_order="both"),
        split({"backbone": 3}, dp=3, units=(ONE_BESIDE_THREE,), batch_size=12, blocking=True, seed=2),
        split(WHOLE, units=(replace(MAKING, dp=2),), made=("draw", "recall"), batch_size=12, seed=4),
        split(MADE, cp=2, made=("draw", "recall"), batch_size=8, seed=6),
        split(WHOLE, cp=2, parts=("merge", "again"), dropout=0.2, microbatch_size=2, batch_size=8, left_out=0.3),
        split(*FEW_CUTS, parts=("merge",), frozen=("backbone",), batch_size=8, seed=2),
        split(*FEW_CUTS, parts=("keys",), batch_size=8, has_long=True, seed=2),
        split(WHOLE, cp=2, parts=("keys",), batch_size=8, has_long=True, seed=3),
        split({"backbone": 3}, units=(BESIDE,), parts=("keys",), batch_size=8, has_long=True, seed=4),
        split(*LLM, units=IN_BUBBLES, parts=("keys",), batch_size=8, has_long=True, fill_seed=3, seed=5),
    ],
    5: [
        split(*LLM, units=(IN_BUBBLES[0], AUDIO_BESIDE), seed=10, batch_size=8, fill_seed=3, filling="by_step"),
        split(WHOLE, units=(replace(MAKING, dp=3),), made=("draw", "recall"), batch_size=12, seed=4),
        split(*FEW_CUTS, units=(replace(MAKING, first_rank=4),), made=("draw", "recall"), batch_size=8, seed=7, zero=3),
    ],
    6: [
        split({"backbone": 3}, units=(MORE_BESIDE,), seed=3, batch_size=8, microbatch_size=2),
        split({"backbone": 3}, dp=4, units=(replace(BESIDE, first_rank=4),), seed=3, batch_size=8),
    ],
}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {2: [0, 8, 9, 12, 14], 3: [2]}))
def test_sequences_that_replicas_share_train_as_in_one_process(num_ranks, cases):
    assert_planned(num_ranks, cases)


def merges(rank: int, num_ranks: int, case: PlannedCase) -> tuple[float, float]:
    """Bytes that ranks give each other in a step so that sequences are merged whole: counted, and by the price."""
    counted, plan, run = Counter(), case.plan(), run_of(case, torch.float64, SAME_TYPES)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("to_merge", "merged"):
            patch.setattr(ContextShare, name, counting(getattr(ContextShare, name), counted))
        batches = run.batches(0, case.model())
        run.step.run(batches, 0)
    priced = 0
    for batch in batches:
        for of_ranks in merge_moves(plan, batch.decision, batch.lengths):
            for name, rows in of_ranks.rows.items():
                layer = plan.model.module(BACKBONE).layers[0] if name == BACKBONE else plan.model.moved(name)[0]
                times = 1 + (name == BACKBONE or plan.model.moved(name)[1])
                priced += times * layer.output_width * 8 * int(rows.sum() - rows.trace())
    return on_all_ranks(counted)["exchange"], priced


def counting(move, counted):
    def moving(share, *arguments):
        before = sum(share.sent)
        moved = move(share, *arguments)
        counted["exchange"] += sum(share.sent) - before
        return moved

    return moving


MERGED = {
    2: [
        split(WHOLE, parts=("merge", "again"), batch_size=8, seed=5),
        replace(split(*FEW_CUTS, dp=1, cp=2, parts=("merge",), frozen=("image",), microbatch_size=2), balance="off"),
    ],
    4: [
        split({"backbone": 3}, units=(BESIDE,), parts=("merge", "stacked"), seed=4, microbatch_size=2, batch_size=8),
        split(WHOLE, cp=2, parts=("merge", "again"), microbatch_size=2, batch_size=8, seed=1),
    ],
}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(MERGED, {2: [0]}))
def test_what_moves_for_merges_is_what_is_priced(num_ranks, cases):
    for case in cases:
        of_ranks = run_ranks(merges, case.num_ranks, case)
        assert len(set(of_ranks)) == 1 and of_ranks[0][0] == of_ranks[0][1] > 0, case
