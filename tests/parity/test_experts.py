"""Mixtures of experts under Plans equal one process, with the balancing loss of their routers.

benchmarks/fuzz_plans.py has experts in a fifth of its cases.
"""

from dataclasses import replace

import pytest

from motet.core.plan import Unit
from motet.runtime.fsdp import FSDPConfig
from parity.cut_steps import Cut
from parity.planned import PlannedCase, assert_planned
from parity.test_context import LLM, WHOLE
from parity.test_context import chain as shared
from parity.test_cut_sequences import check
from parity.test_gradients import Case, check_cases
from parity.test_planned import chain
from parity.test_schedules import CUTS, on_ranks
from ranks import run_ranks
from tiers import in_tiers

RECOMPUTED = {"backbone": 1}, {"backbone": 1}
CASES = {
    1: [PlannedCase(chain({"i": 3, "a": 2, "b": 3}), family=family) for family in ("mixtral", "qwen3_moe")],
    2: [
        PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 2}), family="mixtral", microbatch_size=2),
        PlannedCase(chain({"i": 3, "a": 2, "b": 2}, {"b": 1}, recompute=RECOMPUTED), family="qwen3_moe", tied=True),
        PlannedCase(on_ranks(2, *CUTS["zb_h1", 2]), "zb_h1", family="mixtral"),
        PlannedCase(chain({"i": 3, "a": 2, "b": 3}, dp=2, zero=3), family="qwen3_moe", left_out=0.5),
        PlannedCase(chain({"i": 3, "a": 2, "b": 1}, {"b": 2}), family="mixtral", frozen=("backbone",)),
        *(
            PlannedCase(shared(2, WHOLE, zero=1), family="mixtral", exchange=way, contents=contents, batch_size=3)
            for way, contents in (("group_cast", ()), ("ulysses", ("image",)))
        ),
    ],
    4: [PlannedCase(shared(2, {"image": 3, "audio": 2, **LLM[0]}, LLM[1]), family="qwen3_moe", left_out=0.5)],
}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {1: (0, 1), 2: (2, 3)}))
def test_mixtures(num_ranks, cases):
    assert_planned(num_ranks, cases)


ALL = {"i": 3, "a": 2, "b": 3}
CUT = {"i": 3, "a": 2, "b": 1}, {"b": 2}
BESIDE = Unit("llm", ({"audio": 2, "backbone": 3},), 1, dp=2, ep=2)
SPREAD = {
    # Another unit feeds replicas in common, which meet in one island.
    3: [PlannedCase((Unit("image", ({"image": 3},)), BESIDE), family="mixtral", left_out=0.4)],
    2: [
        PlannedCase(chain(ALL, dp=2, ep=2), family="qwen3_moe", left_out=0.5),
        PlannedCase(chain(ALL, dp=2, ep=2, zero=3), family="mixtral", left_out=0.5, tied=True, dropout=0.2),
        PlannedCase(chain(ALL, dp=2, ep=2, zero=1), family="mixtral", frozen=("backbone",), left_out=0.5),
        PlannedCase(shared(2, WHOLE, zero=2, ep=2), family="mixtral", batch_size=3, exchange="all_gather"),
        PlannedCase(
            chain(ALL, dp=2, ep=2, zero=1), family="mixtral", then=PlannedCase(chain(*CUT), "gpipe", family="mixtral")
        ),
    ],
    4: [
        PlannedCase(chain(*CUT, dp=2, ep=2, zero=1, recompute=RECOMPUTED), family="mixtral", left_out=0.5),
        PlannedCase(on_ranks(2, *CUTS["zb_h1", 2], dp=2, ep=2), "zb_h1", family="mixtral", left_out=0.5),
        PlannedCase(
            chain(ALL, dp=4, ep=2, zero=3),
            family="mixtral",
            batch_size=8,
            then=PlannedCase(chain(ALL, dp=4, ep=4, zero=1, shard_size=2), family="mixtral", batch_size=8),
        ),
        *(PlannedCase(chain(ALL, dp=4, ep=2, zero=z, shard_size=2), family="mixtral", batch_size=8) for z in (2, 3)),
        PlannedCase(shared(2, WHOLE, zero=1, dp=2, ep=4), family="mixtral", batch_size=4, left_out=0.6, dropout=0.2),
        PlannedCase(
            (Unit("image", ({"image": 3},), dp=2), Unit("llm", ({"audio": 2, "backbone": 3},), 2, dp=2, ep=2)),
            family="mixtral",
        ),
    ],
}


WHOLE_MODEL = {"image": 3, "audio": 2, "backbone": 3}


def data_parallel(dp, ep, *, family="mixtral", left_out=0.3, batch_size=8, then=None, **options):
    """Ranks of data parallelism of which `ep` share experts."""
    of_case = {name: options.pop(name) for name in [*options] if name not in Unit.__dataclass_fields__}
    unit = Unit("all", (WHOLE_MODEL,), dp=dp, ep=ep, **{"zero": 3, **options})
    return PlannedCase(
        (unit,), "data_parallel", family=family, left_out=left_out, batch_size=batch_size, then=then, **of_case
    )


SPREAD_IN_DATA_PARALLEL = {
    2: [
        data_parallel(2, 2),
        *(data_parallel(2, 2, zero=zero, family="qwen3_moe", microbatch_size=2) for zero in (0, 1, 2)),
    ],
    4: [
        data_parallel(4, 2, recompute=({"image": 2, "backbone": 2},), left_out=0.6, batch_size=4),
        data_parallel(4, 4, zero=0),
        data_parallel(4, 2, zero=3, shard_size=2, balance="joint"),
        data_parallel(4, 4, zero=2, shard_size=2, balance="per_phase", is_mixed=True),
        data_parallel(4, 2, zero=1, frozen=("backbone",), contents=("image",), tied=True),
        data_parallel(4, 2, lora=("backbone",), dropout=0.2),
        # Stopped under one Plan, gone on under another.
        data_parallel(4, 2, then=data_parallel(4, 4, zero=0)),
        data_parallel(
            4, 4, zero=1, then=PlannedCase(chain(ALL, dp=4, ep=2), family="mixtral", batch_size=8, left_out=0.3)
        ),
    ],
}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(SPREAD_IN_DATA_PARALLEL, {2: (0,), 4: (0,)}))
def test_experts_that_ranks_of_data_parallelism_share(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(SPREAD, {2: (1,)}))
def test_experts_that_ranks_share(num_ranks, cases):
    """Rows go to the ranks of their experts and back, also from replicas that have none, and checkpoints go on under
    another `ep`: with stages, ZeRO, hybrid sharding, shared sequences and split backward passes."""
    assert_planned(num_ranks, cases)


DIVIDED = {
    2: [
        PlannedCase(chain(ALL, tp=2), family="mixtral", left_out=0.5),
        PlannedCase(chain(ALL, tp=2), family="qwen3_moe", dropout=0.2, tied=True),
        PlannedCase(chain(ALL, tp=2), family="mixtral", frozen=("backbone",), microbatch_size=2),
    ],
    4: [
        PlannedCase(chain(*CUT, tp=2, recompute=RECOMPUTED), "zb_h1", family="qwen3_moe", left_out=0.5),
        PlannedCase(chain(ALL, tp=2, dp=2, zero=3), family="mixtral", left_out=0.5),
        PlannedCase(chain(ALL, tp=2, dp=2, zero=1), family="qwen3_moe", chunks=2),
        PlannedCase((replace(shared(2, WHOLE, zero=1)[0], tp=2),), family="mixtral", batch_size=3, left_out=0.3),
        PlannedCase(
            chain(ALL, tp=2, dp=2, zero=2),
            family="mixtral",
            then=PlannedCase(chain(*CUT, dp=2, ep=2, zero=1), family="mixtral"),
        ),
    ],
}


SPREAD_AND_DIVIDED = {
    4: [
        PlannedCase(chain(ALL, tp=2, dp=2, ep=2, zero=3), family="mixtral", left_out=0.5),
        PlannedCase(
            chain(ALL, tp=2, dp=2, ep=2, zero=1, recompute=({"backbone": 2},)),
            family="mixtral",
            batch_size=8,
            tied=True,
            then=PlannedCase(chain(ALL, dp=4, ep=4, zero=2), family="mixtral", batch_size=8, tied=True),
        ),
        PlannedCase((replace(shared(2, WHOLE, zero=1, ep=2)[0], tp=2),), "zb_h1", family="mixtral", left_out=0.3),
        data_parallel(2, 2, tp=2, recompute=({"image": 2, "backbone": 2},), left_out=0.5, batch_size=4),
        *(data_parallel(2, 2, tp=2, zero=zero, dropout=0.2, chunks=2) for zero in (0, 1)),
    ],
}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(SPREAD_AND_DIVIDED, {4: (0, 3)}))
def test_experts_that_ranks_share_whose_products_are_shared_too(num_ranks, cases):
    assert_planned(num_ranks, cases)


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(DIVIDED, {2: (1,), 4: (1,)}))
def test_experts_that_tensor_parallel_ranks_divide(num_ranks, cases):
    """Each has some of the experts, and the router: in stages, with ZeRO, shared sequences and split backward passes,
    and checkpoints go on under `ep`."""
    assert_planned(num_ranks, cases)


WHOLE_COPIES = FSDPConfig(shard_size=1)
DATA_PARALLEL = [
    Case(family="mixtral", num_microbatches=2),
    Case(family="qwen3_moe", fsdp=FSDPConfig(reshard_after_forward=False, recompute={"backbone": 1})),
    Case(family="mixtral", fsdp=WHOLE_COPIES, num_microbatches=3, method="joint"),
    Case(family="qwen3_moe", fsdp=FSDPConfig(shard_size=1, recompute=True)),
    Case(family="mixtral", num_examples=1),
    Case(family="qwen3_moe", frozen=("backbone",)),
    Case(family="mixtral", fsdp=FSDPConfig(recompute="auto"), recomputes=True, num_microbatches=3, mode="exchange"),
]


def test_mixtures_under_data_parallelism():
    """With FSDP and whole copies, a rank without rows, and blocks that are recomputed."""
    assert run_ranks(check_cases, 2, DATA_PARALLEL) == [[]] * 2


def test_mixtures_where_some_sequences_are_cut():
    """Ranks share some sequences, each over ranks of its own, and know nothing of the others."""
    case = Case(family="mixtral", method="per_phase")
    cuts = [
        Cut(case, degrees=(3, 2, 1, 2)),
        Cut(replace(case, family="qwen3_moe", num_microbatches=2, fsdp=FSDPConfig(recompute=True)), idle=1),
        Cut(replace(case, fsdp=WHOLE_COPIES, contents=(), num_examples=5)),
    ]
    assert run_ranks(check, 3, cuts) == [[]] * 3
