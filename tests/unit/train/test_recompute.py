"""What "auto" recomputes: the least that fits, held against every other choice and against the simulator's memory."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.tiny_job import write_tiny_job
from motet.assign.step import joined
from motet.assign.whole_step import decide_step
from motet.core.errors import UserError
from motet.core.workload import BatchLengths
from motet.cost.profile import LayerTimes, ModuleTimes, Points, Profile
from motet.data.groups import GroupedOrder
from motet.data.order import GlobalOrder, ListedOrder
from motet.dispatch import RankBatch
from motet.planner.data_parallel.loads import load_alone, state_of
from motet.planning.plan_of_recipe import plan_of_recipe
from motet.planning.sources import training_data
from motet.schedule import planned
from motet.simulate.predict.stage_pricing import Pricing
from motet.train.balancing import recipe_orchestrator
from motet.train.input.largest import MAX_LARGEST_STEPS, largest_steps
from motet.train.input.ordering import build_order
from motet.train.recipe.recipe_file import load_recipe
from motet.train.recompute import (
    AutoRecompute,
    Recomputation,
    RecomputeRanks,
    auto_recompute,
    memory_bytes,
    recomputed_blocks_of,
    with_numbers,
    words_of_unused,
)

LARGER = (
    "model.encoders.image.config.depth=3",
    "model.encoders.audio.config.encoder_layers=3",
    "model.backbone.config.num_hidden_layers=4",
    "fsdp.recompute=auto",
    "run.microbatches=3",
)
NUM_RANKS = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A recipe, its examples, and its model."""
    recipe = load_recipe(write_tiny_job(tmp_path_factory.mktemp("job") / "data"), LARGER)
    return recipe, *training_data(recipe)


def chosen(job, megabytes, num_ranks=NUM_RANKS) -> AutoRecompute:
    recipe, dataset, spec = job
    ranks = RecomputeRanks(num_ranks, num_ranks, "cpu", int(megabytes * 1e6))
    order = build_order(recipe, dataset, lambda line: None)
    return auto_recompute(recipe, spec, ranks, order, lambda ids: dataset.batch_lengths(ids, 1))


def batches_of(job, auto: AutoRecompute) -> list[RankBatch]:
    """All microbatches of the run, as they are decided; without what is loaded."""
    recipe, dataset, spec = job
    orchestrator = recipe_orchestrator(auto.resolved, spec, NUM_RANKS, "cpu", NUM_RANKS)
    order = GlobalOrder(dataset.num_examples, recipe.data.seed, recipe.data.shuffle)
    batches = []
    for step in range(recipe.run.steps):
        lengths = dataset.batch_lengths(order.take(6 * step, 6), NUM_RANKS)
        lengths = replace(lengths, home=np.tile(np.array([0, 1], np.int32), 3))
        for part in decide_step(orchestrator, lengths, recipe.run.microbatches).microbatches:
            batches.append(RankBatch(None, {}, {}, part.lengths, part.decision))
    return batches


def peak_bytes(auto: AutoRecompute, batch: RankBatch, rank: int, recompute) -> float:
    own = {name: placed.on_rank(rank) for name, placed in batch.decision.assignments.items()}
    return load_alone(auto.job, batch.lengths, own).peak_bytes(recompute, state_of(auto.job, auto.unit))


def fits(auto: AutoRecompute, batch: RankBatch, rank: int, recompute) -> bool:
    return peak_bytes(auto, batch, rank, recompute) <= auto.job.capacity_bytes


@pytest.fixture(scope="module")
def tight(job) -> AutoRecompute:
    """With half of the memory that recomputation can save at all."""
    least, most = chosen(job, 1000.0), None
    for megabytes in np.geomspace(0.3, 3.0, 40):
        try:
            most = chosen(job, megabytes)
            break
        except UserError:
            continue
    assert most is not None
    between = (most.largest.peak_bytes + least.largest.peak_bytes) / 2 / 0.94e6
    return chosen(job, between)


def test_each_microbatch_recomputes_the_least_that_fits_it(job, tight):
    """No other choice fits with no more blocks of any module; what fits without recomputation recomputes nothing."""
    auto = tight
    assert auto.num_blocks and auto.num_decided == auto.num_steps == 8
    every = list(itertools.product(range(4), range(4), range(5)))
    names = list(auto.job.model.num_blocks)
    needs = []
    for batch, rank in itertools.product(batches_of(job, auto), range(NUM_RANKS)):
        recompute = auto.of_rank(batch, rank).recompute
        numbers = tuple(recompute[name] for name in names)
        assert fits(auto, batch, rank, recompute)
        for other in every:
            if other != numbers and all(one <= own for one, own in zip(other, numbers)):
                assert not fits(auto, batch, rank, dict(zip(names, other))), (other, numbers)
        needs.append(any(numbers))
    assert any(needs) and not all(needs)


def test_a_simulated_step_recomputes_in_each_microbatch_what_training_does(job, tight):
    """Its seconds and bytes are those of each microbatch's own numbers, and not those of the largest one's."""
    auto = tight
    batches = batches_of(job, auto)
    assignment = joined([batch.lengths for batch in batches], [batch.decision.assignments for batch in batches])
    numbers = auto.of_assignment(assignment)
    for number, rank in itertools.product(range(len(batches)), range(NUM_RANKS)):
        expected = auto.of_rank(batches[number], rank).recompute
        assert {name: int(table[rank, number]) for name, table in numbers.items()} == expected
    recipe, _, spec = job
    plan = plan_of_recipe(with_numbers(recipe, auto.num_blocks), spec, auto.job.cluster)
    cost = auto.job.cost
    each, largest = (Pricing(plan, planned(plan), assignment, cost, given) for given in (numbers, None))
    for stage in each.planned.stages:
        own, most = each.islands(stage), largest.islands(stage)
        (name,) = stage.modules
        fewer = np.sign(auto.num_blocks.get(name, 0) - numbers[name][[stage.replica]]) * (own.forward > 0)
        assert np.array_equal(np.sign(own.held - most.held), fewer)
        assert np.array_equal(np.sign(most.recompute - own.recompute), fewer)
        assert own.forward == pytest.approx(most.forward) and own.weight == pytest.approx(most.weight)
    assert any(not np.array_equal(table, table[:1, :1]) for table in numbers.values())
    assert each.hardware_flops() < largest.hardware_flops()


def test_the_largest_microbatch_of_few_steps_is_a_bound(job, tight):
    auto = tight
    for batch, rank in itertools.product(batches_of(job, auto), range(NUM_RANKS)):
        assert peak_bytes(auto, batch, rank, auto.num_blocks) <= auto.largest.peak_bytes <= auto.job.capacity_bytes
    assert re.search(r"with \d of \d of .* recomputed, the largest microbatch of all 8 steps takes", str(auto))


def test_the_steps_of_a_mixture_are_those_that_train(tmp_path):
    """A manifest of which no example comes in the run weighs nothing."""
    path = write_tiny_job(tmp_path / "data")
    lines = (path.parent / "train.jsonl").read_text().splitlines(keepends=True)
    (path.parent / "texts.jsonl").write_text("".join(lines[::4]))
    manifests = {"alone": '["texts.jsonl"]', "all": '["texts.jsonl", "train.jsonl"]'}
    recipes = {name: load_recipe(path, (*LARGER, f"data.train={listed}")) for name, listed in manifests.items()}
    recipes["mixture"] = load_recipe(path, (*LARGER, f"data.train={manifests['all']}", "data.mixture=[999, 1]"))
    jobs = {name: (recipe, *training_data(recipe)) for name, recipe in recipes.items()}
    largest = {name: chosen(job, 1000.0).largest.peak_bytes for name, job in jobs.items()}
    assert largest["mixture"] == largest["alone"] < largest["all"]


def test_with_enough_memory_nothing_is_recomputed(job):
    auto = chosen(job, 1000.0)
    assert auto.num_blocks == {} and "recomputes nothing: the largest" in str(auto)
    assert all(not any(auto.of_rank(batch, 0).recompute.values()) for batch in batches_of(job, auto))


def test_if_nothing_fits_both_figures_are_said(job):
    with pytest.raises(
        UserError, match=r'"auto": with every block recomputed, .* takes \S+ MB on a rank, which may fill 0.094 MB'
    ):
        chosen(job, 0.1)


def test_ranks_without_items_recompute_nothing(job, tight):
    auto = tight
    batch = batches_of(job, auto)[0]
    lengths = batch.lengths.take(np.zeros(0, dtype=np.int64))
    spec = job[2]
    decision = recipe_orchestrator(auto.resolved, spec, NUM_RANKS, "cpu", NUM_RANKS).decide(lengths)
    empty = auto.of_rank(replace(batch, lengths=lengths, decision=decision), 1)
    assert not any(empty.recompute.values())


def test_what_is_stated_holds_for_every_microbatch(job):
    recipe, _, spec = job
    stated = load_recipe(Path(recipe.run.dir).parent / "recipe.toml", (*LARGER[:3], "fsdp.recompute={ image = 2 }"))
    recomputation = Recomputation(stated, spec)
    batch = batches_of(job, chosen(job, 1000.0))[0]
    assert recomputation.of_rank(batch, 0).recompute == recomputation.num_blocks == {"image": 2}
    assert recomputation.metrics([replace(batch, recompute={"image": 2})]) == {
        "image": [2],
        "audio": [0],
        "backbone": [0],
    }


def test_modules_without_a_backward_pass_are_not_recomputed(job):
    recipe, _, _ = job
    frozen = ("model.encoders.image.train_encoder=false", "fsdp.recompute=true")
    other = load_recipe(Path(recipe.run.dir).parent / "recipe.toml", (*LARGER[:3], *frozen))
    _, spec = training_data(other)
    assert set(recomputed_blocks_of(other, spec)) == {"audio", "backbone"}
    for numbers, said in (("{ image = 2, backbone = 1 }", "fsdp.recompute.image: without effect"), ("true", "")):
        stated = load_recipe(
            Path(recipe.run.dir).parent / "recipe.toml", (*LARGER[:3], frozen[0], f"fsdp.recompute={numbers}")
        )
        assert words_of_unused(stated, spec).startswith(said)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (('cluster={ device = "cpu", memory_gbytes = 3.5 }',), 35 * 10**8),
        (('cluster={ device = "h100" }',), 80 * 10**9),
        (('cluster={ device = "h100", memory_gbytes = 70 }',), 70 * 10**9),
    ],
)
def test_memory_is_that_of_the_recipe(job, cluster, expected):
    recipe = load_recipe(Path(job[0].run.dir).parent / "recipe.toml", cluster)
    assert memory_bytes(recipe, torch.device("cpu")) == expected


@pytest.mark.parametrize("cluster", [(), ('cluster={ device = "cpu" }',)])
def test_a_cpu_does_not_tell_its_memory(job, cluster):
    recipe = load_recipe(Path(job[0].run.dir).parent / "recipe.toml", cluster)
    with pytest.raises(UserError, match=r'which a CPU does not tell: give .cluster. with device = "cpu" and memory_gb'):
        memory_bytes(recipe, torch.device("cpu"))


def drawn(num_examples, seed):
    rng = np.random.default_rng(seed)
    sequence = rng.geometric(0.01, num_examples)
    return BatchLengths(sequence, sequence, np.zeros(num_examples, np.int32), {})


def test_of_few_steps_all_may_be_the_largest():
    def lengths_of(ids):
        raise AssertionError("no length is needed")

    order = GlobalOrder(10)
    steps = largest_steps(MAX_LARGEST_STEPS, 4, order, {"backbone": 3}, lengths_of)
    assert np.array_equal(np.concatenate([step.ids for step in steps]), order.take(0, 4 * MAX_LARGEST_STEPS))


def test_of_many_steps_those_with_most_and_with_the_largest_example_are_taken():
    lengths, order = drawn(5000, seed=1), GlobalOrder(5000, seed=2)
    steps = largest_steps(900, 8, order, {"backbone": 3}, lengths.take)
    ids = order.take(0, 900 * 8).reshape(900, 8)
    of_steps = lengths.sequence[ids]
    found = [int(np.flatnonzero((ids == step.ids).all(axis=1))[0]) for step in steps]
    assert found == sorted(found) and len(found) <= MAX_LARGEST_STEPS
    assert of_steps.sum(axis=1).argmax() in found and of_steps.max(axis=1).argmax() in found
    left = np.setdiff1d(np.arange(900), found)
    assert of_steps.sum(axis=1)[left].max() <= np.sort(of_steps.sum(axis=1))[-MAX_LARGEST_STEPS // 2]


def test_of_steps_of_groups_those_with_the_largest_groups_are_taken():
    lengths = drawn(3000, seed=3)
    order = GroupedOrder({"backbone": lengths.sequence}, {"backbone": 800}, seed=4)
    steps = largest_steps(200, 2, order, {"backbone": 1}, lengths.take)
    assert len(steps) <= MAX_LARGEST_STEPS and all(step.group[-1] == 1 for step in steps)
    position, totals = 0, []
    for _ in range(200):
        step = order.step(position, 2)
        position += len(step.ids)
        totals.append(lengths.sequence[step.ids].sum())
    assert max(lengths.sequence[step.ids].sum() for step in steps) == max(totals)


def test_groups_of_a_list_are_taken_by_number_to_its_end():
    order = ListedOrder(np.arange(10, 17), np.array([0, 0, 1, 2, 2, 2, 3]))
    first, second, last = order.step(0, 2), order.step(3, 2), order.step(7, 2)
    assert (first.ids.tolist(), first.group.tolist()) == ([10, 11, 12], [0, 0, 1])
    assert (second.ids.tolist(), second.group.tolist()) == ([13, 14, 15, 16], [0, 0, 0, 1])
    assert not len(last.ids)


def test_groups_and_auto_recomputation_go_together(tmp_path):
    recipe = load_recipe(write_tiny_job(tmp_path / "data"), (*LARGER, "data.group=auto", "run.microbatches=1"))
    of_groups = (recipe, *training_data(recipe))
    least, most = chosen(of_groups, 1000), chosen(of_groups, 1000)
    assert str(least) == str(most) and least.num_blocks == {}
    largest_mb = least.largest.peak_bytes / 0.94 / 1e6
    tight = chosen(of_groups, 0.97 * largest_mb)
    assert sum(tight.num_blocks.values()) > 0 and tight.largest.peak_bytes <= tight.job.capacity_bytes


def write_profile(path, spec, share):
    """A profile whose layers keep `share` of what they are said to, and take a microsecond a row."""
    rows, seconds = (10.0, 100.0), (1e-5, 1e-4)
    modules = []
    for module in spec.modules:
        layers = {}
        for layer in module.layers:
            kept = tuple(share * row * layer.activation_width * 4 for row in rows)
            points = Points(
                rows=rows, pairs=(0.0, 0.0), forward_s=seconds, input_s=seconds, weight_s=seconds, kept_bytes=kept
            )
            reach = layer.attention.reach if layer.attention else None
            times = LayerTimes(kind=layer.kind, weights=layer.weights, reach=reach, grid=points, held_out=points)
            layers[layer.kind, layer.weights, reach] = times
        batches = tuple(((1, int(row)),) for row in rows)
        modules.append(ModuleTimes(name=module.name, grid=batches, held_out=batches, layers=tuple(layers.values())))
    about = {"recipe": "tiny", "device": "cpu", "precision": "float32", "torch": "", "measured_at": "", "num_ranks": 1}
    Profile(modules=tuple(modules), **about).write(path)


def test_a_run_that_balances_on_a_profile_recomputes_by_its_bytes(job, tmp_path):
    """Where blocks must be recomputed, none are if layers keep a tenth of what they are said to; more if 1.5 times."""
    recipe, dataset, spec = job

    def num_recomputed(share, megabytes):
        if share is None:
            return sum(chosen(job, megabytes).num_blocks.values())
        write_profile(tmp_path / f"{share}.json", spec, share)
        update = {"cost": "profile", "profile": tmp_path / f"{share}.json"}
        balanced = recipe.model_copy(update={"balance": recipe.balance.model_copy(update=update)})
        return sum(chosen((balanced, dataset, spec), megabytes).num_blocks.values())

    enough = chosen(job, 1000).largest.peak_bytes / 1e6
    short = next(
        each for share in np.arange(1.05, 0.5, -0.02) if num_recomputed(None, each := enough * share) in (1, 2, 3)
    )
    assert num_recomputed(0.1, short) == 0
    assert num_recomputed(1.5, short) > num_recomputed(None, short) > 0
