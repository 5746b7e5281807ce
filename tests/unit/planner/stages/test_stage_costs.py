"""What stages hold and recompute, against every choice there is, and closed forms against simulations."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.planner.candidate import Pins
from motet.planner.chain.pipeline import chain_passes
from motet.planner.chain.propose import ChainSearch
from motet.planner.degrees import Degrees
from motet.planner.modality_parallel.pipeline import ModalityDegrees, ModalityPipeline
from motet.planner.stages.blocks import Blocks, blocks_of
from motet.planner.stages.partition import partition
from motet.planner.stages.stage_costs import ROUNDING, StageLimits, settle, stage_numbers, stages_of
from motet.planner.stages.step_time import StageGraph, pipeline_s
from motet.schedule import high_water, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from motet.schedule.generators.modality_parallel import modality_parallel
from motet.simulate import simulate, stage_times
from unit.planner.jobs import job

PROGRAMS = {
    "1f1b": one_f_one_b(4, 12),
    "interleaved_1f1b": interleaved_1f1b(4, 3, 12),
    "zb_h1": zb_h1(4, 12),
    "zb_v": zb_v(4, 12),
}


@pytest.mark.parametrize("name", PROGRAMS)
@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_the_fullest_moments_hold_what_the_program_holds(name, seed):
    program = PROGRAMS[name]
    held = np.random.default_rng(seed).random(program.num_stages)
    limits = StageLimits.of(program, 1.0)
    most = [float((limits.moments[rank] @ held[limits.rank == rank]).max()) for rank in range(program.num_ranks)]
    assert most == pytest.approx(high_water(program, held).tolist())


@pytest.mark.parametrize("make", [lambda m: interleaved_1f1b(4, 3, m), lambda m: zb_v(4, m), lambda m: zb_h1(4, m)])
def test_two_microbatches_a_rank_fill_a_pipeline(make):
    some, more = (StageLimits.of(make(number), 1.0).moments for number in (8, 24))
    assert all(np.array_equal(one, other) for one, other in zip(some, more))


@pytest.mark.parametrize("num_microbatches", [1, 3, 8, 20])
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_moments_of_ranks_with_one_stage_need_no_program(pp, num_microbatches):
    some_job = job()
    search = ChainSearch(some_job, Pins())
    for schedule in ("1f1b", "zb_h1") if pp > 1 else ("1f1b",):
        degrees = Degrees(1, pp, 1, 1, num_microbatches, schedule)
        counted = StageLimits.of(chain_passes(degrees, num_microbatches), some_job.capacity_bytes)
        same_limits(search._limits_of(degrees), counted)


@pytest.mark.parametrize("num_microbatches", [1, 3, 20])
@pytest.mark.parametrize("num_stages", [(1, 1, 1), (3, 1, 2), (2, 3, 4)])
def test_moments_of_modules_side_by_side_need_no_program(num_stages, num_microbatches):
    some_job = job()
    names = [module.name for module in some_job.model.modules]
    pipeline = ModalityPipeline(some_job, ModalityDegrees(num_stages, 1, 1, 1, num_microbatches))
    stages = dict(zip(names, num_stages, strict=True))
    backbone = stages.pop("backbone")
    program = modality_parallel(stages, backbone, num_microbatches)
    same_limits(pipeline.limits, StageLimits.of(program, some_job.capacity_bytes))


def same_limits(one, other):
    assert one.rank.tolist() == other.rank.tolist()
    assert [moments.tolist() for moments in one.moments] == [moments.tolist() for moments in other.moments]


def toy(kept, saved, recompute_s, owner=None, **others):
    """Blocks of 1 s forward and 1 s backward. others: further columns."""
    num = len(kept)
    zero = np.zeros(num)
    columns = {name: zero for name in Blocks.__dataclass_fields__ if name not in ("names", "owner")}
    columns |= {"kept_bytes": np.array(kept, float), "saved_bytes": np.array(saved, float)}
    columns |= {"recompute_s": np.array(recompute_s, float), "forward_s": np.ones(num), "backward_s": np.ones(num)}
    columns |= others
    return Blocks(("a", "b"), np.array(owner if owner is not None else [0] * num), **columns)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_no_less_recomputation_fits_and_what_is_recomputed_does(data):
    number = data.draw(st.integers(2, 6))
    first = data.draw(st.integers(0, number))
    owner = np.repeat([0, 1], [first, number - first])
    kept = np.array([10, 14])[owner]
    saved, again = (np.array(data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9))))[owner] for _ in range(2))
    blocks = toy(kept, saved, again, owner)
    counts = (number // 2, number - number // 2)
    limits = StageLimits.of(one_f_one_b(2, 4), data.draw(st.integers(10, 120)) / (1 - ROUNDING))
    stage = stage_numbers(counts)
    found = stages_of(blocks, stage, limits)
    for rank, in_flight in enumerate((2, 1)):
        own = np.flatnonzero(stage == rank)
        fits = []
        for numbers in product(*(range(int((owner[own] == module).sum()) + 1) for module in (0, 1))):
            chosen = np.concatenate([np.arange((owner[own] == module).sum()) < numbers[module] for module in (0, 1)])
            held = in_flight * (kept[own] - saved[own] * chosen).sum()
            if held <= limits.capacity_bytes * (1 - ROUNDING) + 1e-6:
                fits.append(float((again[own] * chosen).sum()))
        added = float((again[own] * found.recomputed[own]).sum())
        if fits:
            assert added == min(fits) and found.fullness[rank] <= 1 + 1e-9
        else:
            assert found.recomputed[own].all() and found.fullness[rank] > 1 and found.shortfall_bytes > 0


@pytest.mark.parametrize("mode", ["none", "least", "full"])
def test_a_pinned_mode_is_kept(mode):
    blocks = toy([10] * 4, [8] * 4, [1] * 4)
    stages = stages_of(blocks, stage_numbers((2, 2)), StageLimits.of(one_f_one_b(2, 4), 30.0, mode))
    assert {"none": 0, "least": 1, "full": 4}[mode] == stages.recomputed.sum()
    assert (stages.shortfall_bytes > 0) == (mode == "none")


def test_recomputation_moves_the_cut():
    """Rank 0 holds two microbatches and must recompute, so that it gets fewer blocks than an even cut gives it."""
    blocks = toy([10] * 12, [9] * 12, [1.0] * 12)
    limits = StageLimits.of(one_f_one_b(2, 4), 62.0)

    def cut(block_s):
        return stage_numbers(partition(block_s.tolist(), 2))

    even = stages_of(blocks, stage_numbers((6, 6)), limits)
    settled = settle(blocks, limits, cut, lambda stages: float(stages.seconds.max()))
    assert even.recomputed.any() and not settled.shortfall_bytes
    assert settled.seconds.max() <= even.seconds.max()
    assert settled.layers[0]["a"] < 6


@pytest.mark.parametrize("name", PROGRAMS)
@given(st.lists(st.floats(1.0, 1.3), min_size=12, max_size=12), st.floats(0, 0.2))
@settings(max_examples=15, deadline=None)
def test_closed_forms_are_near_the_simulation_where_stages_are_nearly_even(name, block_s, send_s):
    program = PROGRAMS[name]
    number = program.num_stages
    seconds = np.array(block_s[:number])
    none = [0] * number
    blocks = toy(none, none, none, forward_s=seconds, backward_s=2 * seconds, deferred_s=seconds)
    stages = stages_of(blocks, np.arange(number), StageLimits.of(program, 1.0))
    rank = np.array([stage.rank for stage in program.stages])
    graph = StageGraph(name, 12, rank, tuple(pairwise(range(number))))
    sends = np.where(rank[1:] == rank[:-1], 0.0, send_s)
    simulated = simulate(program, stage_times(stages.forward_s, stages.backward_s, send_s=sends[:, None])).makespan_s
    assert pipeline_s(graph, stages, sends) == pytest.approx(simulated, rel=0.2)


@pytest.mark.parametrize("make", [zb_h1, zb_v])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 7, 12])
def test_closed_forms_of_zero_bubble_schedules_hold_with_few_microbatches(make, num_microbatches):
    program = make(4, num_microbatches)
    number = program.num_stages
    none = [0] * number
    blocks = toy(none, none, none, backward_s=np.full(number, 2.0), deferred_s=np.ones(number))
    stages = stages_of(blocks, np.arange(number), StageLimits.of(program, 1.0))
    rank = np.array([stage.rank for stage in program.stages])
    graph = StageGraph(make.__name__, num_microbatches, rank, tuple(pairwise(range(number))))
    simulated = simulate(program, stage_times(np.ones(number), np.full(number, 2.0))).makespan_s
    assert pipeline_s(graph, stages, np.zeros(number - 1)) == pytest.approx(simulated, rel=0.07)


def test_of_backward_waits_for_w_what_the_runtime_leaves_to_it():
    """The weights of products; not those of the embedding, of norms and of the output layer."""
    given_job = job()
    costs, module = given_job.block_costs("backbone", 1), given_job.model.module("backbone")
    waits = np.zeros(costs.num_blocks)
    for number, block in enumerate(module.blocks):
        for layer in (module.layers[index] for index in block):
            seconds = given_job.cost.layer_seconds("backbone", layer, given_job.work("backbone", layer, 1))
            waits[number] += float(seconds.weight_s.mean()) * layer.defers_weights
    assert costs.deferred_s == pytest.approx(waits)
    assert 0 < costs.deferred_s[-1] == pytest.approx(costs.deferred_s[0])  # The head is in the last block.


def test_a_chain_carries_the_outputs_of_encoders_that_are_over():
    given_job = job()
    names = ("image", "audio", "backbone")
    chained = blocks_of(given_job, names, 1, 1, 1)
    alone = [blocks_of(given_job, (name,), 1, 1, 1).output_bytes for name in names]
    assert chained.output_bytes[6:10] == pytest.approx(alone[1] + alone[0][-1])
    assert chained.output_bytes[10:] == pytest.approx(alone[2])
