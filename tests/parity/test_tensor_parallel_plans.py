"""Plans with `tp` 2 equal one process: chains, replicas, ZeRO, recomputation, W apart, tied embeddings.

benchmarks/fuzz_plans.py divides layers in three of ten units that may have it, with all else.
"""

from itertools import pairwise

import pytest

from motet.core.plan import Unit
from motet.runtime.sections import spans_of
from motet.schedule import planned
from parity.planned import MIXED_TOLERANCE, PlannedCase, assert_planned, differences, errors_of
from parity.planned_parts import num_blocks_with
from parity.test_bubbles import in_halves
from ranks import run_ranks
from tiers import in_tiers

ALL = {"image": 3, "audio": 2, "backbone": 3}
CUT = {"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2}


def chain(*stages, **options):
    """One unit of two tensor-parallel ranks a stage."""
    return (Unit("all", stages, pp=len(stages), **{"zero": 0, "tp": 2, **options}),)


def families(units, *names, **options):
    """Biases, norms of heads, products that are stored as one, norms of whole rows."""
    return [
        PlannedCase(units, family=name, **options) for name in names or ("qwen2", "qwen3", "llama", "phi3", "olmo2")
    ]


@pytest.mark.parametrize(
    "names", [pytest.param(("qwen2", "qwen3"), marks=pytest.mark.slow), ("phi3", "olmo2")], ids=" ".join
)
def test_one_stage(names):
    assert_planned(2, families(chain(ALL), *names))


def test_dropout_between_branches_is_of_the_rows_that_a_rank_has():
    options = {"dropout": 0.2, "contents": ("image",)}
    assert_planned(
        2,
        [
            PlannedCase(chain(ALL), family="phi3", **options),
            PlannedCase(chain(ALL), family="opt", microbatch_size=2, **options),
        ],
    )


@pytest.mark.slow
def test_what_one_stage_may_have():
    assert_planned(
        2,
        [
            PlannedCase(chain(ALL), tied=True, contents=("audio",), microbatch_size=2),
            PlannedCase(chain(ALL, recompute=({"image": 2, "audio": 1, "backbone": 2},)), family="qwen3", dropout=0.2),
            PlannedCase(chain(ALL), frozen=("image", "audio encoder")),
            PlannedCase(chain(ALL), frozen=("backbone",), contents=()),
        ],
    )


@pytest.mark.slow
def test_stages():
    assert_planned(
        4,
        [
            PlannedCase(chain(*CUT, recompute=({"image": 2, "backbone": 1}, {"backbone": 1})), "gpipe", blocking=True),
            PlannedCase(chain(*CUT), "zb_h1", tied=True, family="qwen3"),
            PlannedCase(chain({"image": 3, "audio": 1}, {"audio": 1, "backbone": 3}), frozen=("image",)),
        ],
    )


@pytest.mark.slow
def test_replicas_and_shared_state():
    assert_planned(
        4,
        [
            *(PlannedCase(chain(ALL, dp=2, zero=zero), family="qwen3", tied=zero == 1) for zero in (0, 1, 3)),
            PlannedCase(chain(ALL, dp=2, zero=2), frozen=("image encoder",), microbatch_size=3),
        ],
    )


@pytest.mark.slow
def test_products_that_are_split():
    """Under ZeRO, with parts that are frozen, and on the way from and to checkpoints of others."""
    whole, shared = (Unit("all", (ALL,), dp=2, pp=1, zero=3),), chain(ALL)
    assert_planned(
        2,
        [
            PlannedCase(shared, family="phi3", then=PlannedCase(whole, family="phi3")),
            PlannedCase(whole, family="phi3", then=PlannedCase(shared, family="phi3")),
            PlannedCase(shared, family="phi3", frozen=("backbone block",), microbatch_size=2),
            PlannedCase(
                (Unit("all", (ALL,), dp=2, pp=1, zero=1),), family="olmo2", then=PlannedCase(shared, family="olmo2")
            ),
        ],
    )
    others = (Unit("all", CUT, pp=2, dp=2, zero=1),)
    assert_planned(4, [PlannedCase(others, family="phi3", then=PlannedCase(chain(*CUT), "zb_h1", family="phi3"))])


IN_CHUNKS = [
    PlannedCase(chain(ALL), chunks=2, family="qwen3", microbatch_size=2),
    PlannedCase(chain(ALL, recompute=({"image": 2, "audio": 1, "backbone": 2},)), chunks=3, dropout=0.2),
    PlannedCase(chain(ALL), chunks=3, frozen=("image", "backbone block"), tied=True),
    PlannedCase(chain(ALL), chunks=2, family="phi3", lora=("image", "backbone")),
]


@pytest.mark.slow
def test_products_in_chunks():
    assert_planned(2, IN_CHUNKS)


IN_CHUNKS_OF_4 = [
    PlannedCase(chain(*CUT), "zb_h1", chunks=2, family="qwen3"),
    PlannedCase(chain(ALL, dp=2, zero=3), chunks=3, family="llama"),
    PlannedCase(chain(ALL, cp=2), chunks=2),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({4: IN_CHUNKS_OF_4}, {4: (0,)}))
def test_products_in_chunks_in_stages_and_replicas(num_ranks, cases):
    assert_planned(num_ranks, cases)


COPIED = [
    PlannedCase(chain(ALL), chunks=2, copied=True, family="qwen3", microbatch_size=2),
    PlannedCase(chain(ALL, recompute=({"image": 2, "audio": 1, "backbone": 2},)), chunks=3, copied=True, dropout=0.2),
    PlannedCase((Unit("all", (ALL,), tp=2),), "data_parallel", chunks=2, copied=True, family="olmo2"),
]
COPIED_OF_4 = [
    PlannedCase(chain(*CUT), "zb_h1", chunks=2, copied=True, family="qwen3"),
    PlannedCase(chain(ALL, dp=2, zero=3), chunks=3, copied=True, family="llama"),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: COPIED, 4: COPIED_OF_4}, {2: (0,), 4: ()}))
def test_chunks_that_are_copied(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.slow
def test_float32_passes():
    cases = [PlannedCase(chain(ALL, dp=2, zero=zero), is_mixed=True) for zero in (0, 3)]
    wrong = [line for of_rank in run_ranks(_mixed, 4, cases) for line in of_rank]
    assert not wrong, "\n".join(wrong)


def _mixed(rank, num_ranks, cases):
    return [line for case in cases for line in differences(errors_of(case), MIXED_TOLERANCE)]


IMAGE, LLM = {"image": 3}, {"audio": 2, "backbone": 3}


def beside(image, llm):
    """An encoder's unit and the backbone's. image, llm: options of each."""
    first = Unit("image", (IMAGE,), **{"zero": 0, **image})
    return first, Unit("llm", (LLM,), first.num_ranks, **{"zero": 0, **llm})


@pytest.mark.slow
def test_units_with_degrees_of_their_own():
    assert_planned(
        3,
        [
            PlannedCase(beside({}, {"tp": 2})),
            PlannedCase(beside({"tp": 2}, {}), family="qwen3"),
            PlannedCase(beside({}, {"tp": 2}), frozen=("image",), microbatch_size=2),
        ],
    )


@pytest.mark.slow
def test_encoders_in_bubbles_and_replicated_ones():
    backbone = Unit("llm", ({"backbone": 2}, {"backbone": 1}), pp=2, tp=2, zero=0)
    others = [Unit(name, ({name: count},), tp=2, dp=2, zero=1) for name, count in (("image", 3), ("audio", 2))]
    replicated = Unit("llm", ({"backbone": 2}, {"backbone": 1}), pp=2, tp=2, zero=0, replicated=("image", "audio"))
    filled = PlannedCase((backbone, *others))
    halved = in_halves(filled, {"image": 6, "audio": 3})
    assert_planned(4, [filled, halved, PlannedCase((replicated,), tied=True)])


@pytest.mark.slow
def test_a_run_goes_on_with_and_without():
    whole = (Unit("all", CUT, pp=2, zero=0),)
    shared = (Unit("all", (ALL,), dp=2, zero=3),)
    assert_planned(
        2,
        [
            PlannedCase(chain(ALL), tied=True, then=PlannedCase(whole, tied=True)),
            PlannedCase(shared, family="qwen3", then=PlannedCase(chain(ALL), family="qwen3")),
        ],
    )


@pytest.mark.slow
def test_a_run_goes_on_under_other_shares():
    assert_planned(4, [PlannedCase(chain(ALL, dp=2, zero=2), then=PlannedCase(chain(*CUT)))])


@pytest.mark.slow
def test_shared_copies_of_cut_parameters():
    """Hybrid sharding: a mesh of tensor-parallel ranks, copies and shards."""
    assert_planned(8, [PlannedCase(chain(ALL, dp=4, zero=3, shard_size=2), batch_size=4, tied=True)])


def inside(seed, *, zero=0, schedule="1f1b", **options):
    """Encoders in bubbles of a backbone with TP 2, with fills inside its passes, where this seed has them."""
    cut = ({"backbone": 1},) * 4 if schedule in ("interleaved_1f1b", "zb_v") else ({"backbone": 2}, {"backbone": 2})
    recompute, of_image = (), ()
    if options.pop("recomputes", False):
        recompute, of_image = tuple({"backbone": 1} for _ in cut), ({"image": 2},)
    llm_cp = options.pop("llm_cp", 1)
    backbone = Unit("llm", cut, pp=2, tp=2, cp=llm_cp, zero=zero, recompute=recompute)
    degrees = {"tp": options.pop("tp", 2), "cp": options.pop("cp", 1)}
    image = Unit("image", ({"image": 3},), dp=options.pop("dp", 2), zero=1, recompute=of_image, **degrees)
    audio = Unit("audio", ({"audio": 1}, {"audio": 1}), pp=2, tp=2, cp=llm_cp, zero=0)
    return PlannedCase((backbone, image, audio), schedule, num_layers=4, fill_seed=seed, **options)


CASES_INSIDE = [
    inside(4, family="qwen3", microbatch_size=2, tied=True),
    inside(1, recomputes=True, dropout=0.2),
    inside(3, schedule="zb_h1", batch_size=4),
    inside(7, schedule="interleaved_1f1b", deferred_warmup=True, batch_size=4, family="phi3"),
    inside(0, contents=("image",), frozen=("image encoder",), left_out=0.3),
    inside(6, frozen=("backbone",), lora=("backbone",), tp=1, cp=2),
    inside(11, zero=3, family="mixtral"),
    inside(0, parts=("again",), contents=("image",), batch_size=4),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({4: CASES_INSIDE}, {4: (0,)}))
def test_fills_inside_passes(num_ranks, cases):
    for case in cases:
        assert any("." in fill.before and not fill.before.endswith(".0") for fill in case.plan().fills)
    assert_planned(num_ranks, cases)


CASES_WITH_SUMS = [
    inside(38, contents=("image",), batch_size=4),
    inside(3, recomputes=True, dropout=0.2),
    inside(18, schedule="zb_h1", batch_size=4, family="phi3"),
    inside(38, schedule="interleaved_1f1b", deferred_warmup=True, batch_size=4),
    inside(4, frozen=("image encoder", "backbone"), lora=("backbone",), left_out=0.3),
    inside(17, lora=("image", "audio"), frozen=("audio block",), zero=3),
    inside(28, frozen=("image block",), left_out=0.5, microbatch_size=2),
    inside(11, filling="by_step", parts=("again",), contents=("image",), batch_size=4),
    inside(38, is_mixed=True),
]
OF_EIGHT = [
    inside(38, llm_cp=2, dp=4, contents=("image",)),  # Groups of ranks deal items out, and some have none.
    inside(18, llm_cp=2, cp=2, recomputes=True),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({4: CASES_WITH_SUMS, 8: OF_EIGHT}, {4: (0,)}))
def test_sums_of_encoders_in_parts_of_their_own(num_ranks, cases):
    for case in cases:
        assert any(stage.has_sums for stage in planned(case.plan()).stages)
    assert_planned(num_ranks, cases)


def cut_in_bubbles(seed, *, cp=1, recompute=0, **options):
    """Encoders in bubbles whose passes are cut between blocks, or inside them, where this seed has them so."""
    of_image = ({"image": recompute},) if recompute else ()
    blocks = num_blocks_with(options.get("parts", ()), ALL)
    llm = Unit("llm", ({"backbone": 3},), tp=2, cp=cp, zero=0)
    image = Unit("image", ({"image": blocks["image"]},), tp=2, cp=cp, zero=0, recompute=of_image)
    audio = Unit("audio", ({"audio": blocks["audio"]},), tp=2, cp=cp, zero=0)
    return PlannedCase((llm, image, audio), fill_seed=seed, **options)


CASES_CUT = [
    cut_in_bubbles(7, dropout=0.2),
    cut_in_bubbles(13, recompute=2),
    cut_in_bubbles(12, frozen=("image encoder", "*norm*"), left_out=0.3),
    cut_in_bubbles(13, lora=("image",), frozen=("image block",), dropout=0.2, microbatch_size=2),
    cut_in_bubbles(8, parts=("queries",), chunks=2),
    cut_in_bubbles(13, parts=("stacked",), contents=("image",)),
    cut_in_bubbles(13, parts=("tiled",)),
    cut_in_bubbles(7, parts=("keys",), recompute=1),
    cut_in_bubbles(13, frozen=("image",), is_mixed=True),
]
CUT_OF_FOUR = [
    cut_in_bubbles(13, cp=2, contents=("image",), has_large=True, recompute=1),
    cut_in_bubbles(7, cp=2, contents=("image",), has_large=True, dropout=0.2, left_out=0.5),
    cut_in_bubbles(8, cp=2, parts=("queries",), contents=("image",), has_large=True),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({2: CASES_CUT, 4: CUT_OF_FOUR}, {2: (0, 1)}))
def test_cut_passes_of_encoders_have_parts_of_the_rows(num_ranks, cases):
    for case in cases:
        plan = case.plan()
        spans = [span for stage in planned(plan).stages for span in spans_of(stage, plan.model)]
        assert any(span.goes_on and span.part < behind.part for span, behind in pairwise(spans))
    assert_planned(num_ranks, cases)
