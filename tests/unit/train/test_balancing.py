from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cli.tiny_job import write_tiny_job
from motet.assign.plan import assign_step
from motet.assign.whole_step import decide_step
from motet.balance import LengthWork, PhaseCosts
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, home_ranks
from motet.cost.flops import batch_flops, step_flops
from motet.cost.profile import LayerTimes, ModuleTimes, Points, Profile
from motet.data.text import ChatTokenizer
from motet.dispatch import BalanceConfig, Decision
from motet.models.build import build_mllm
from motet.models.spec import model_spec
from motet.planning.cluster import ClusterOptions
from motet.planning.job import JobOptions
from motet.planning.plan_of_recipe import read_recipe_as_plan
from motet.train.balancing import build_orchestrator, check_same_backend, read_measured
from motet.train.predicting import run_cost
from motet.train.recipe.recipe_file import load_recipe
from motet.train.report.metrics import balance_metrics, phase_metrics
from motet.train.report.summary import methods_line
from parity.planned import build_hf_model


def test_ranks_with_different_cores_are_refused():
    check_same_backend(SimpleNamespace(gather=lambda own: [own, own, own]))
    with pytest.raises(UserError, match="Rank 2 balances without the native core and rank 0 with it"):
        check_same_backend(SimpleNamespace(gather=lambda own: ["native", "native", "fallback"]))


NO_COSTS = PhaseCosts({}, LengthWork())


def test_metrics_count_methods_and_add_up_seconds_over_microbatches():
    decisions = [
        Decision({}, {}, NO_COSTS, {}, 0.0, "joint", "joint: first", {"joint": 0.25, "per_phase": 0.5}),
        Decision({}, {}, NO_COSTS, {}, 0.0, "mixed", "mixed: it", {"joint": 0.5, "mixed": 0.25, "per_phase": 0.5}),
        Decision({}, {}, NO_COSTS, {}, 0.0, "joint", "joint: second", {"joint": 0.25, "per_phase": 0.5}),
    ]
    assert balance_metrics([SimpleNamespace(decision=decision) for decision in decisions]) == {
        "methods": {"joint": 2, "mixed": 1},
        "predicted_s": {"joint": 1.0, "mixed": 0.25, "per_phase": 1.5},
        "why": {"joint": "joint: second", "mixed": "mixed: it"},
        "cut": None,
    }
    assert methods_line({"mixed": 1, "joint": 1200}) == "joint 1,200, mixed 1 of 1,201 microbatches"


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    return write_tiny_job(tmp_path_factory.mktemp("job") / "data")


def model_of(recipe):
    return build_mllm(recipe.model, ChatTokenizer.from_directory(recipe.data.tokenizer).vocabulary_size)


def columns_of(cuts):
    return cuts and [getattr(cuts, name).tolist() for name in cuts.columns]


def decided_by_training(recipe, batch, num_ranks, ranks_per_node=None):
    """What training decides of a microbatch, on a rank of this machine's CPU."""
    orchestrator = orchestrator_of(recipe, num_ranks, ranks_per_node)
    return orchestrator.decide(replace(batch, home=home_ranks(batch.num_examples, num_ranks)))


def orchestrator_of(recipe, num_ranks, ranks_per_node=None):
    model, dtype = model_of(recipe), getattr(torch, recipe.fsdp.param_dtype or recipe.run.dtype)
    measured = read_measured(recipe, model_spec(model))
    return build_orchestrator(
        recipe.balance,
        model,
        num_ranks,
        torch.device("cpu"),
        dtype,
        recompute=recipe.fsdp.recomputed(model_spec(model).num_blocks),
        measured=measured,
        ranks_per_node=ranks_per_node,
        waits=recipe.fsdp.waits,
    )


CHEAP = "balance.speed={ device_tflops = 1e-6, link_latency_us = 0.0 }"
WAYS = [
    (),
    ("balance.method=joint",),
    ("balance.method=per_phase", "fsdp.recompute=true"),
    ("fsdp.recompute={ backbone = 1 }",),
    ("balance.cost=length",),
    ("balance.cost=length", "balance.costs={ backbone = { linear = 3, quadratic = 1 } }"),
    ("balance.cost=profile",),
    ("balance.speed={ link_gbytes_per_s = 1e6, link_latency_us = 0.0 }", "run.microbatches=2"),
    ("balance.speed={ device_tflops = 1e-6 }", "run.dtype=float64"),
    ("run.microbatches=4", "balance.defer=off"),
    ("run.microbatches=4", "balance.cost=length"),
    ("run.microbatches=8", "balance.cost=profile"),
    ("run.microbatches=2", "balance.phases=off"),
    ("balance.policy=padded", "balance.method=per_phase"),
    ("balance.policy=packed", "balance.cost=profile", "run.microbatches=2"),
    ("balance={ policy = { audio = 'padded_attention' }, cost = 'length', costs.audio = { quadratic = 2 } }",),
    ("balance.split=auto", CHEAP, "run.microbatches=8"),
    ("balance.split=auto", CHEAP, "run.microbatches=8", "fsdp.shard_size=1", "fsdp.recompute={ backbone = 1 }"),
    ("balance.split=auto", CHEAP, "run.microbatches=4", "balance.cost=length"),
]


NODES = (
    "balance.speed={ device_tflops = 1e-6, link_latency_us = 0.0, inter_node_gbytes_per_s = 1e-6, "
    "inter_node_latency_us = 1e9 }"
)


@pytest.mark.parametrize("by_node", [pytest.param((3,), marks=pytest.mark.slow), (1, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("overrides", [*WAYS, (NODES,), ("balance.node_wise=false",)], ids=" ".join)
def test_prediction_places_every_item_where_training_does(recipe_file, overrides, by_node):
    overrides = ("run.batch_size=24", *overrides)
    recipe = load_recipe(recipe_file, overrides)
    if recipe.balance.cost == "profile":
        write_profile(recipe, model_spec(model_of(recipe)))
    plan, job = read_recipe_as_plan(recipe_file, overrides, JobOptions(ClusterOptions("cpu", 1, 3)))
    per_node = max(by_node)
    where = replace(plan.cluster, num_nodes=len(by_node), ranks_per_node=per_node)
    units = (replace(plan.units[0], first_rank=per_node - by_node[0]),)
    plan = replace(plan, cluster=where, units=units)
    assert plan.replicas_by_node == by_node
    batch = job.workload.draw(24, np.random.default_rng(1))
    placed = assign_step(plan, batch, job.balancing)
    count = recipe.run.microbatches
    home = np.tile(home_ranks(24 // count, 3), count)
    step = decide_step(orchestrator_of(recipe, 3, by_node), replace(batch, home=home), count)
    assert placed.num_microbatches == len(step.microbatches) == count
    assert placed.methods == (() if plan.balance == "off" else tuple(p.decision.method for p in step.microbatches))
    assert (step.method != "") == (count > 1 and recipe.balance.defer == "auto")
    if recipe.balance.cut_by:
        assert any(part.decision.shares_items for part in step.microbatches)
    elif count == 8:
        assert step.method == "defer"
    for number, part in enumerate(step.microbatches):
        for phase, assignment in part.decision.assignments.items():
            items = placed.modules[phase]
            own = items.microbatch == number
            np.testing.assert_array_equal(items.replica[own], assignment.ranks, phase)
            np.testing.assert_array_equal(items.position[own], assignment.positions, phase)
            cuts = items.cuts and items.cuts.keep(own)
            assert columns_of(cuts) == columns_of(part.decision.cuts_of(phase))
            np.testing.assert_array_equal(items.length[own], batch.take(part.examples).of(phase).length, phase)


def test_training_exchanges_less_between_slow_nodes(recipe_file):
    """The same ranks, on one node and on one each: what crosses a slow network is not worth its balance."""
    recipe = load_recipe(recipe_file, ["run.batch_size=24", NODES])
    _, job = read_recipe_as_plan(recipe_file, ("run.batch_size=24",), JobOptions(ClusterOptions("cpu", 1, 3)))
    batch = job.workload.draw(24, np.random.default_rng(1))
    beside, apart = (decided_by_training(recipe, batch, 3, per_node) for per_node in (3, 1))
    assert beside.predicted_s["joint"] == apart.predicted_s["joint"]
    assert beside.predicted_s["per_phase"] < apart.predicted_s["per_phase"]
    assert (beside.method, apart.method) == ("per_phase", "joint")


def test_what_predictions_do_not_price_is_refused(recipe_file):
    overrides = ("run.batch_size=24", "balance.communicator=all_gather")
    assert orchestrator_of(load_recipe(recipe_file, overrides), 3).communicator == "all_gather"
    with pytest.raises(UserError, match=r'balance\.communicator = "all_gather" is for training; steps are predicted'):
        read_recipe_as_plan(recipe_file, overrides, JobOptions(ClusterOptions("cpu", 1, 3)))


GRID = tuple(((count, length),) for count in (1, 4) for length in (8, 20, 60))


def write_profile(recipe, spec, device="cpu"):
    """Each layer takes a nanosecond for a row and a weight, and ten for a pair, in every pass."""
    modules = [
        ModuleTimes(name=module.name, grid=GRID, held_out=GRID, layers=tuple(layer_times(module)))
        for module in spec.modules
    ]
    whole = {
        "recipe": "tiny",
        "device": device,
        "precision": "float32",
        "torch": "2",
        "measured_at": "",
        "num_ranks": 1,
    }
    Profile(**whole, modules=tuple(modules)).write(recipe.run.dir / "profile.json")


def test_a_profile_of_another_device_than_the_run_is_on_is_told(recipe_file, tmp_path):
    """Balancing goes on by it, and nothing is predicted by it."""
    recipe = load_recipe(recipe_file, (f"run.dir={tmp_path}", "balance.cost=profile"))
    spec = model_spec(model_of(recipe))
    plan, _ = read_recipe_as_plan(recipe_file, (), JobOptions(ClusterOptions("cpu", 1, 2)))
    for device, is_here in (("cpu (2 cores)", True), ("NVIDIA H100 80GB HBM3", False)):
        write_profile(recipe, spec, device)
        said = read_measured(recipe, spec).elsewhere_words("cpu")
        cost = run_cost(SimpleNamespace(plan=plan, file="plan.json"), recipe, torch.device("cpu"))
        told = f"profile.json was measured on {device}, and this run is on cpu"
        assert not isinstance(cost, str) if is_here else told in cost
        assert said == "" if is_here else told in said


def layer_times(module):
    for kind, layer in {(layer.kind, layer.weights): layer for layer in module.layers}.items():
        rows, pairs = ([sum(n * length**power for n, length in batch) for batch in GRID] for power in (1, 2))
        taken = [1e-9 * (r * (layer.weights + 1) + 10 * p * (layer.attention is not None)) for r, p in zip(rows, pairs)]
        points = Points(rows=rows, pairs=pairs, forward_s=taken, input_s=taken, weight_s=taken)
        yield LayerTimes(kind=kind[0], weights=kind[1], grid=points, held_out=points)


def test_images_of_tiles_are_cut_between_them():
    config = BalanceConfig(method="split")
    for part, tile_rows in (("tiled", {"image": 4}), ("stacked", {})):
        model = build_hf_model(parts=(part,))
        costs = build_orchestrator(config, model, 2, torch.device("cpu"), torch.float32).costs
        times = costs.times
        assert set(times.item_keys) == {"image", "audio"} and times.tile_rows == tile_rows
        assert bool(times.item_keys["image"]) == (not tile_rows)
        images = ItemLengths(np.zeros(1, np.int64), np.array([64]), np.array([16]))
        items = {"image": images, "audio": ItemLengths(*np.zeros((3, 0), np.int64))}
        lengths = BatchLengths(np.array([30]), np.array([3]), np.zeros(1, np.int32), items)
        (phase,) = (each for each in costs.phases(lengths) if each.name == "image")
        assert phase.rows.tolist() == [16] and phase.tile_rows == sum(tile_rows.values())


def test_keys_that_queries_read_move_by_rows_and_those_of_queries_by_queries():
    model = build_hf_model(parts=("queries",))
    costs = build_orchestrator(BalanceConfig(method="split"), model, 2, torch.device("cpu"), torch.float32).costs
    images = ItemLengths(np.arange(2), np.array([64, 2]), np.array([3, 3]))
    items = {"image": images, "audio": ItemLengths(np.zeros(1, np.int64), np.array([20]), np.array([3]))}
    lengths = BatchLengths(np.array([30, 30]), np.array([3, 3]), np.zeros(2, np.int32), items)
    phases = {phase.name: phase for phase in costs.phases(lengths)}
    # Of two rows no three queries make anything that ranks could share.
    assert phases["image"].rows.tolist() == [3, 1]
    rows = {name: [keys.rows(phase.key_lengths)[0] for keys in phase.keys] for name, phase in phases.items()}
    # The tower's; then those of a resampler's layers, which see queries, too, or of a Q-Former's.
    assert rows["image"] == [64, 64 + 3] and set(rows["audio"]) == {10, 3} and rows["backbone"] == [30]


def test_padded_attention_of_items_with_segments_is_refused(recipe_file):
    stated = "balance={ policy = { image = 'padded_attention' }, cost = 'length', costs.image = { quadratic = 2 } }"
    recipe = load_recipe(recipe_file, [stated])
    model = model_of(recipe)
    model.encoders["image"].cut = lambda sizes: ItemSegments.cut(sizes.prod(axis=1), 4)
    with pytest.raises(UserError, match="pads whole items, and those of 'image' have segments"):
        build_orchestrator(recipe.balance, model, 2, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("cost", "unit"), [("flops", "FLOP"), ("length", "tokens"), ("profile", "ps")])
def test_what_is_logged_is_what_was_balanced(recipe_file, cost, unit):
    recipe = load_recipe(recipe_file, [f"balance.cost={cost}"])
    spec = model_spec(model_of(recipe))
    write_profile(recipe, spec)
    _, job = read_recipe_as_plan(recipe_file, [], JobOptions(ClusterOptions("cpu", 1, 2)))
    batch = job.workload.draw(16, np.random.default_rng(2))
    decision = decided_by_training(recipe, batch, 2)
    logged = phase_metrics(spec, [SimpleNamespace(decision=decision, lengths=batch)])
    assert logged[BACKBONE]["unit"] == unit
    backbone, total = decision.backbone, sum(logged[BACKBONE]["loads"])
    if cost == "length":
        assert total == batch.sequence.sum()
        assert logged["audio"]["unit"] == "length"
    if cost == "flops":
        # Of rank 0, by the very count that MFU is made of.
        own = backbone.on_rank(0)
        num_targets = int(batch.num_targets[own].sum())
        exact = step_flops(spec.module(BACKBONE), batch.sequence[own], num_targets, reached=True)
        assert logged[BACKBONE]["loads"][0] == exact
        assert total == batch_flops(spec, batch)[BACKBONE]
        computed_on = {"audio": decision.assignments["audio"].ranks}
        assert sum(logged["audio"]["loads"]) == batch_flops(spec, batch, computed_on=computed_on)["audio"]
        assert logged["audio"]["unit"] == unit
