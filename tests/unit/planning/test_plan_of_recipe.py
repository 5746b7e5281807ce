from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli.tiny_job import write_tiny_job
from motet.assign.balancing import by_operations
from motet.balance import METHODS, Packed, Padded, PaddedAttention
from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import UserError
from motet.core.plan import Unit
from motet.core.sampler import Sampler
from motet.core.workload import BACKBONE
from motet.cost.analytic import Analytic
from motet.cost.catalogue import ClusterConfig
from motet.data.groups import GroupedOrder, phase_totals
from motet.data.text import ChatTokenizer
from motet.dispatch import BalanceConfig
from motet.models.spec import spec_of_config
from motet.planner.alone import fixed_bytes, on_ranks
from motet.planner.candidate import Candidate, Pins
from motet.planner.chain.propose import propose_chain
from motet.planner.data_parallel.propose import propose_data_parallel
from motet.planner.job import Job
from motet.planner.search import search
from motet.planning.cluster import ClusterOptions, cluster_of
from motet.planning.job import JobOptions, job_of_recipe
from motet.planning.plan_of_recipe import plan_of_recipe, read_recipe_as_plan, recipe_of_plan
from motet.planning.sources import training_data
from motet.planning.trainable import obstacle, on_all_ranks
from motet.schedule import coarse_fills, fillable, planned
from motet.schedule.program import Kind
from motet.simulate.predict.batch import draw_batch
from motet.simulate.predict.predict import assign_batch, predict
from motet.train.balancing import balancing_of
from motet.train.planned_job import ChosenPlan
from motet.train.recipe.recipe_file import load_recipe
from motet.train.world import StartedRanks


def hardware(num_ranks, num_nodes=1):
    link = Link(1e9, 1e-5)
    return Cluster(Device("test", {"fp32": 1e12}, 1 << 30, 1e12), num_nodes, num_ranks, link, link)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    return write_tiny_job(tmp_path_factory.mktemp("job") / "data")


def planned_recipe(recipe_file, num_ranks, *overrides):
    recipe = load_recipe(recipe_file, overrides)
    spec = spec_of_config(recipe.model, ChatTokenizer.from_directory(recipe.data.tokenizer).vocabulary_size, "tiny")
    return plan_of_recipe(recipe, spec, hardware(num_ranks))


def test_all_modules_are_on_all_ranks(recipe_file):
    plan = planned_recipe(recipe_file, 3)
    (unit,) = plan.units
    assert unit.dp == plan.cluster.num_ranks == 3
    assert unit.stages == ({"image": 1, "audio": 1, BACKBONE: 2},)
    assert (plan.schedule, plan.balance, plan.precision) == ("data_parallel", "auto", "fp32")
    assert (plan.batch_size, plan.microbatch_size) == (6, 2)
    assert len(planned(plan).stages) == 9


@pytest.mark.parametrize(
    ("overrides", "zero", "shard_size"),
    [
        ((), 3, 0),
        (("fsdp.reshard_after_forward=false",), 2, 0),
        (("fsdp.reshard_after_forward=false", "fsdp.once_a_step=true"), 1, 0),
        (("fsdp={ reshard_after_forward = false, once_a_step = true, shard_size = 2 }",), 1, 2),
        (("fsdp.shard_size=1",), 0, 0),
        (("fsdp.shard_size=2",), 3, 2),
        (("fsdp.shard_size=4",), 3, 0),
    ],
)
def test_sharding_is_what_fsdp_does(recipe_file, overrides, zero, shard_size):
    (unit,) = planned_recipe(recipe_file, 4, "run.batch_size=8", *overrides).units
    assert (unit.zero, unit.shard_size) == (zero, shard_size)


def test_a_rank_that_holds_all_gathers_nothing_and_sums_once_a_step(recipe_file):
    plan = planned_recipe(recipe_file, 2, "fsdp.shard_size=1", "run.batch_size=8", "run.microbatches=2")
    kinds = [(action.kind, action.microbatch) for action in planned(plan).program.actions[0]]
    assert not any(kind in (Kind.GATHER, Kind.GATHER_B) for kind, _ in kinds)
    assert {microbatch for kind, microbatch in kinds if kind is Kind.REDUCE} == {-1}
    assert {microbatch for kind, microbatch in kinds if kind is Kind.F} == {0, 1}


def test_recomputation_and_precision(recipe_file):
    plan = planned_recipe(recipe_file, 2, "fsdp.recompute=true", "fsdp.param_dtype=bfloat16")
    (unit,) = plan.units
    assert unit.recompute == unit.stages and plan.precision == "bf16"


def test_the_state_of_the_optimizer(recipe_file):
    names = ("adamw", "sgd", "rmsprop")
    plans = [planned_recipe(recipe_file, 2, "fsdp.shard_size=1", f"optimizer.name={name}") for name in names]
    plans.append(planned_recipe(recipe_file, 2, "fsdp.shard_size=1", "optimizer={name='sgd',lr=1e-3,momentum=0}"))
    assert [plan.moments for plan in plans] == [2, 1, 1, 0]
    two, one, same, none = (fixed_bytes(plan, *on_ranks(plan)) for plan in plans)
    assert one == same and two - one == one - none > 0


@pytest.mark.parametrize(
    ("override", "balance"), [("balance.phases=off", "off"), ("balance.method=joint", "joint"), ("run.seed=1", "auto")]
)
def test_balance(recipe_file, override, balance):
    assert planned_recipe(recipe_file, 2, override).balance == balance


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "said"),
    [
        (4, (), r"run.batch_size = 6 cannot be planned for 4 ranks and run.microbatches = 1: .* multiple of 4"),
        (2, ("run.microbatches=2",), r"must be a multiple of 4"),
        (3, ("fsdp.shard_size=2",), r"fsdp.shard_size = 2 must divide the number of ranks, which is 3"),
        (2, ("balance.phases=backbone",), r"balance.phases = \"backbone\" balances some phases"),
    ],
)
def test_what_no_plan_can_say_is_refused(recipe_file, num_ranks, overrides, said):
    with pytest.raises(UserError, match=said):
        planned_recipe(recipe_file, num_ranks, *overrides)


def candidates(recipe_file, num_ranks, pins, *overrides):
    """What the planner proposes for the recipe's model: data-parallel Plans on all ranks, or chains."""
    recipe = load_recipe(recipe_file, overrides)
    spec = planned_recipe(recipe_file, num_ranks, *overrides).model
    cluster, task = hardware(num_ranks), {"name": "text", "text": {"value": 40}}
    items = {"image": {"length": {"value": 16}, "length_per_token": 4}, "audio": {"length": {"value": 40}}}
    workload = Sampler.model_validate({"task": [{**task, "items": items}]}).workload(num_examples=200)
    job = Job(spec, cluster, workload, recipe.run.batch_size, Analytic(cluster, "fp32"), "fp32")
    strategies = (propose_data_parallel, propose_chain) if pins.pp is None else (propose_chain,)
    found = [each.plan for strategy in strategies for each in strategy(job, pins) if isinstance(each, Candidate)]
    assert found
    return recipe, found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"recompute": "full"},
        {"recompute": "none"},
        {"balance": "off"},
        {"balance": "joint"},
        {"balance": "per_phase"},
        {"microbatch_size": 1},
    ],
)
def test_a_plan_that_can_be_run_is_the_plan_of_its_recipe(recipe_file, num_ranks, pins):
    pins = Pins(strategies=("data parallel",), tp=1, schedule="data_parallel", **pins)
    recipe, plans = candidates(recipe_file, num_ranks, pins, "run.batch_size=8", "balance.method=joint")
    for plan in plans:
        settings = recipe_of_plan(plan, recipe)
        assert plan_of_recipe(settings, plan.model, plan.cluster) == plan
        # What is not a matter of the plan stays; and the settings are those that a recipe may have.
        assert settings.model == recipe.model and settings.data == recipe.data
        assert type(settings).model_validate(settings.model_dump(exclude_unset=True)) == settings


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("fsdp.shard_size=2",),
        ("fsdp.shard_size=1",),
        ("fsdp.reshard_after_forward=false", "fsdp.recompute=true"),
        ("fsdp.reshard_after_forward=false", "fsdp.once_a_step=true", "run.microbatches=2"),
        ("fsdp.recompute={ backbone = 1 }",),
        ("run.microbatches=2", "balance.method=per_phase"),
        ("balance.phases=off", "fsdp.param_dtype=bfloat16"),
        ("balance.policy={ image = 'padded' }",),
        ("balance.policy={ audio = 'padded_attention' }", "balance={ cost = 'length', costs.audio.quadratic = 1 }"),
        ("balance.speed={ device_tflops = 3.0 }", "run.dtype=float64"),
        ("balance.split=auto",),
    ],
)
def test_a_recipe_is_the_recipe_of_its_plan(recipe_file, overrides):
    overrides = ("run.batch_size=8", *overrides)
    plan, recipe = planned_recipe(recipe_file, 4, *overrides), load_recipe(recipe_file, overrides)
    other = load_recipe(recipe_file, ("run.batch_size=24", "run.microbatches=3", "fsdp.recompute=true", *overrides[1:]))
    assert recipe_of_plan(plan, recipe) == recipe
    assert plan_of_recipe(recipe_of_plan(plan, other), plan.model, plan.cluster) == plan


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("auto", {}),
        ("padded", {"image": "padded"}),
        ("packed", {"audio": "packed"}),
        ("{ image = 'packed', audio = 'packed' }", {"audio": "packed"}),
    ],
)
def test_a_plan_has_the_policies_that_are_not_the_modules_own(recipe_file, policy, expected):
    plan = planned_recipe(recipe_file, 2, f"balance.policy={policy}")
    assert plan.policy == expected
    assert by_operations(plan).costs == {
        "image": Padded() if "image" in expected else Packed(),
        "audio": Packed() if "audio" in expected else Padded(),
        BACKBONE: Packed(),
    }


def test_parts_of_lengths_are_known_to_the_recipe_alone(recipe_file):
    stated = ("balance={ policy = { audio = 'padded_attention' }, cost = 'length', costs.audio.quadratic = 2 }",)
    plan, recipe = planned_recipe(recipe_file, 2, *stated), load_recipe(recipe_file, stated)
    assert balancing_of(recipe, plan.model)(plan).costs["audio"] == PaddedAttention(1, 2)
    with pytest.raises(UserError, match="which only a recipe with"):
        by_operations(plan)


def test_the_planner_balances_by_the_recipes_policy(recipe_file):
    given = JobOptions(ClusterOptions("a40", ranks_per_node=2))
    plan, job = read_recipe_as_plan(recipe_file, ["balance.policy=padded", "run.batch_size=48"], given)
    assert plan.policy == job.policy == {"image": "padded"}
    found = search(job, {"data parallel": propose_data_parallel}, max_simulated=None, is_refined=False).results
    policies = {(each.candidate.plan.balance == "off", str(each.candidate.plan.policy)) for each in found}
    assert policies <= {(False, str(job.policy)), (True, "{}")} and (False, str(job.policy)) in policies
    plans = [replace(plan, balance="per_phase", policy=policy) for policy in (plan.policy, {})]
    placed = [job.assignment(each).modules["image"].replica.tolist() for each in plans]
    assert placed[0] != placed[1]


def test_what_is_measured_or_stated_for_balancing_goes_where_nothing_is_balanced(recipe_file):
    plan = planned_recipe(recipe_file, 2, "balance.phases=off")
    for given in (
        "balance.cost=profile",
        "balance.speed={ device_tflops = 3.0 }",
        "balance.method=joint",
        "balance={ node_wise = false, communicator = 'all_gather' }",
    ):
        settings = recipe_of_plan(plan, load_recipe(recipe_file, (given,)))
        assert settings.balance == BalanceConfig(phases="off")
    joint = replace(planned_recipe(recipe_file, 2), balance="joint")
    settings = recipe_of_plan(joint, load_recipe(recipe_file, ("balance.node_wise=false",)))
    assert settings.balance == BalanceConfig(method="joint")


def test_a_plan_that_cuts_long_items_is_trained_so(recipe_file):
    plan, recipe = replace(planned_recipe(recipe_file, 2), balance="split"), load_recipe(recipe_file)
    settings = recipe_of_plan(plan, recipe)
    assert settings.balance.methods == (*METHODS, "split") and not obstacle(plan, recipe)
    for overrides, said in (
        ({"balance.mode=exchange"}, "balance 'split', which takes examples that every rank can read"),
        ({"balance.communicator=all_gather"}, "balance 'split', which sends each rank its rows alone"),
        ({"run.compile=true"}, "balance 'split' beside run.compile"),
    ):
        assert obstacle(plan, load_recipe(recipe_file, overrides)).startswith(said)
    with pytest.raises(UserError, match=r"let --pin balance=split cut them"):
        job_of_recipe(recipe_file, JobOptions(ClusterOptions("cpu", 1, 2)), ["balance.split=auto"])
    with pytest.raises(UserError, match='set method = "auto" and split = "auto" to simulate the recipe'):
        planned_recipe(recipe_file, 2, "balance.method=split")


def test_what_training_cannot_run(recipe_file):
    recipe, plan = load_recipe(recipe_file), replace(planned_recipe(recipe_file, 2), precision="bf16")
    assert obstacle(plan, recipe) == "another precision than the recipe"
    with pytest.raises(UserError, match="has another precision than the recipe, which training cannot run yet"):
        recipe_of_plan(plan, recipe)


def test_chains_are_run_under_their_plan(recipe_file):
    """No recipe says what they are."""
    recipe, plans = candidates(recipe_file, 2, Pins(pp=2, tp=1), "run.batch_size=8")
    obstacles = {plan.schedule: obstacle(plan, recipe) for plan in plans}
    assert {"1f1b", "zb_h1", "zb_v"} <= obstacles.keys() and set(obstacles.values()) == {""}
    for plan in plans:
        with pytest.raises(UserError, match="which no recipe can say: train under the plan"):
            recipe_of_plan(plan, recipe)


@pytest.mark.parametrize(
    ("ranks", "needed"),
    [
        ((1, 4, 0, 3), (1, 3)),
        ((1, 4, 0, 4), (1, 4)),
        ((3, 2, 0, 4), (2, 2)),
        ((3, 2, 0, 1), (1, 1)),
        ((3, 2, 0, 3), (2, 2)),
        ((1, 4, 1, 2), (1, 3)),
        ((3, 2, 2, 2), (2, 2)),
        ((3, 2, 2, 3), (3, 2)),
        ((3, 2, 1, 4), (3, 2)),
    ],
    ids=[
        "some of a node",
        "all",
        "some nodes",
        "one",
        "some of a node beside a whole one",
        "one before others",
        "a node before others",
        "a node before others and one",
        "one of a node before others, and of one behind them",
    ],
)
def test_nodes_that_are_left_over_are_not_started(recipe_file, ranks, needed):
    """ranks: nodes, ranks of a node, the first of the Plan, and how many it has. needed: nodes and ranks of a node that
    train it."""
    recipe, plan = load_recipe(recipe_file), planned_recipe(recipe_file, 1)
    num_nodes, ranks_per_node, first_rank, dp = ranks
    unit = replace(plan.units[0], dp=dp, first_rank=first_rank)
    plan = replace(plan, cluster=hardware(ranks_per_node, num_nodes), units=(unit,))
    found = plan.needed_cluster
    assert (found.num_nodes, found.ranks_per_node) == needed
    assert not obstacle(plan, recipe)
    what = on_all_ranks(lambda plan: "")(plan)
    assert what == ("" if dp == num_nodes * ranks_per_node else "ranks left over")
    # Ranks that are started, and do not train.
    started = StartedRanks(0, found.num_ranks, found.ranks_per_node)
    chosen = ChosenPlan(plan, Path("plan.json"), str)
    used = tuple(range(first_rank, first_rank + dp))
    assert chosen.used(started) == (None if dp == found.num_ranks else used)
    assert plan.closed_up.ranks == set(range(dp))
    more = StartedRanks(0, num_nodes * ranks_per_node, ranks_per_node)
    assert chosen.used(more, in_phase=True) == (None if dp == more.num_ranks else used)
    assert more.num_ranks == found.num_ranks or chosen.used(more) is None


def test_units_close_up_where_ranks_between_them_are_left_over(recipe_file):
    plan = planned_recipe(recipe_file, 1)
    llm = Unit("llm", ({"backbone": 1}, {"backbone": 1}), pp=2, first_rank=4)
    units = llm, Unit("image", ({"image": 1},), first_rank=1), Unit("audio", ({"audio": 1},), first_rank=2)
    plan = replace(plan, cluster=hardware(6), units=units, schedule="1f1b", balance="off", microbatch_size=1)
    assert [unit.first_rank for unit in plan.closed_up.units] == [2, 0, 1]
    assert plan.closed_up.closed_up == plan.closed_up


@pytest.mark.parametrize(
    ("num_parts", "split", "part"),
    [(1, False, ""), (2, False, ""), (3, False, ""), (4, False, ""), (5, False, "2F0.0"), (1, True, "")],
)
def test_parts_of_fills_are_run_if_they_are_blocks_or_halves_of_blocks(recipe_file, num_parts, split, part):
    recipe, (plan, *_) = candidates(recipe_file, 2, Pins(pp=2, tp=1, schedule="1f1b"), "run.batch_size=8")
    llm = Unit("llm", ({"backbone": 1}, {"backbone": 1}), pp=2)
    units = llm, Unit("encoders", ({"image": 1, "audio": 1},), dp=2)
    plan = replace(plan, units=units, microbatch_size=1)
    unfilled, pipelines = fillable(plan, split=split)
    plan = replace(plan, fills=coarse_fills(unfilled.program, pipelines, num_parts))
    assert obstacle(plan, recipe) == (
        part and f"parts of passes that are no blocks and no halves of blocks ({part} of fills)"
    )


@pytest.mark.parametrize(
    ("tp", "pieces", "num_parts", "said"),
    [
        (2, 1, 9, ""),
        (2, 1, 8, "parts of passes that are no blocks and no halves of blocks (2F0.0 of fills)"),
        (2, 2, 9, "sums of an encoder apart (2F0.1) beside tensor_pieces 2; let it be 1"),
        (1, 1, 9, "parts of passes that are no blocks and no halves of blocks (2F0.0 of fills)"),
    ],
)
def test_sums_are_apart_where_ranks_share_an_encoders_products(recipe_file, tp, pieces, num_parts, said):
    recipe, (plan, *_) = candidates(recipe_file, 2, Pins(pp=2, tp=1, schedule="1f1b"), "run.batch_size=8")
    llm = Unit("llm", ({"backbone": 1}, {"backbone": 1}), pp=2, tp=2)
    units = llm, Unit("encoders", ({"image": 1, "audio": 1},), dp=2, tp=tp, cp=2 // tp)
    where = replace(plan.cluster, ranks_per_node=4, device=replace(plan.cluster.device, overlaps=True))
    plan = replace(plan, cluster=replace(where, tensor_pieces=pieces), units=units, microbatch_size=1)
    unfilled, pipelines = fillable(plan)
    plan = replace(plan, fills=coarse_fills(unfilled.program, pipelines, num_parts))
    assert obstacle(plan, recipe) == said


def test_fills_inside_passes_stand_in_for_products_in_pieces(recipe_file):
    recipe, (plan, *_) = candidates(recipe_file, 2, Pins(pp=2, tp=1, schedule="1f1b"), "run.batch_size=8")
    llm = Unit("llm", ({"backbone": 1}, {"backbone": 1}), pp=2, tp=2)
    plan = replace(plan, units=(llm, Unit("encoders", ({"image": 1, "audio": 1},), dp=4)), microbatch_size=1)
    where = replace(plan.cluster, ranks_per_node=4, device=replace(plan.cluster.device, overlaps=True))
    plan = replace(plan, cluster=replace(where, tensor_pieces=2))
    unfilled, pipelines = fillable(plan, split=True)
    inside = replace(plan, fills=coarse_fills(unfilled.program, pipelines))
    said = "fills inside passes (0F0.0) beside tensor_pieces 2, in whose place they are; let it be 1"
    assert (obstacle(inside, recipe), obstacle(plan, recipe)) == (said, "")


def test_pieces_are_copied_inside_a_node_alone(recipe_file):
    recipe, (plan, *_) = candidates(recipe_file, 2, Pins(pp=2, tp=1, schedule="1f1b"), "run.batch_size=8")
    unit = Unit("all", plan.units[0].stages, pp=2, tp=2)
    where = replace(plan.cluster, ranks_per_node=4, device=replace(plan.cluster.device, overlaps=True))
    where = replace(where, tensor_pieces=2, tensor_transport="copy_engines")
    inside = replace(plan, units=(unit,), cluster=where)
    between = replace(inside, cluster=replace(where, num_nodes=4, ranks_per_node=1))
    half = replace(inside, units=(replace(unit, first_rank=1),), cluster=replace(where, num_nodes=2, ranks_per_node=3))
    said = (
        "tensor_transport 'copy_engines', which copies inside a node, beside ranks {} to {} of unit 'all', which share"
    )
    assert obstacle(inside, recipe) == ""
    assert obstacle(between, recipe) == f"{said.format(0, 1)} products (tp) between nodes"
    assert obstacle(half, recipe) == ""
    aside = replace(half, units=(replace(unit, first_rank=2),))
    assert obstacle(aside, recipe).startswith(said.format(2, 3))
    alone = replace(between, units=(replace(unit, tp=1, dp=2),), microbatch_size=1)
    assert obstacle(alone, recipe) == ""


def test_a_recipe_is_planned_with_its_own_data(recipe_file):
    """And for its own cluster, that of the command line, or this machine."""
    given = JobOptions(ClusterOptions("H100", 2))
    plan, job = read_recipe_as_plan(recipe_file, ["run.batch_size=32"], given)
    assert (plan.cluster.num_nodes, plan.cluster.ranks_per_node, plan.units[0].dp) == (2, 8, 16)
    assert job.workload.examples.num_examples == 40 and np.all(job.workload.examples.sequence > 0)
    stated = ["cluster.device=a40", "cluster.ranks_per_node=3"]
    assert read_recipe_as_plan(recipe_file, stated, JobOptions(ClusterOptions()))[0].cluster.device.name == "a40"
    on_cpu, _ = read_recipe_as_plan(recipe_file, [], JobOptions(ClusterOptions(ranks_per_node=2)))
    assert not on_cpu.cluster.device.overlaps and plan.cluster.device.overlaps
    with pytest.raises(UserError, match="--cluster h1000: there is no device 'h1000'"):
        read_recipe_as_plan(recipe_file, [], JobOptions(ClusterOptions("h1000")))


def test_another_device_takes_over_what_is_not_of_the_recipes_device(tmp_path):
    stated = ClusterConfig(device="a40", nodes=2, memory_gbytes=10, tensor_pieces=4, tensor_transport="copy_engines")
    other = cluster_of(tmp_path, stated, ClusterOptions("h100"))
    assert (other.num_nodes, other.tensor_pieces, other.tensor_transport) == (2, 4, "copy_engines")
    assert other.device == ClusterConfig(device="h100").cluster().device
    with pytest.raises(UserError, match="tensor_pieces is 4, but ranks on 'cpu' compute nothing while"):
        cluster_of(tmp_path, stated, ClusterOptions("cpu"))


def test_what_a_recipe_is_simulated_to_take_is_what_it_is_planned_with(recipe_file):
    """`motet simulate` on the settings of a Plan that `motet plan` has found, and on that Plan: the same to the bit."""
    given = JobOptions(ClusterOptions("a40", ranks_per_node=2))
    _, job = read_recipe_as_plan(recipe_file, [], given)
    recipe = load_recipe(recipe_file)
    found = search(job, {"data parallel": propose_data_parallel}, max_simulated=None, is_refined=False).results
    results = [result for result in found if not obstacle(result.candidate.plan, recipe)]
    assert len(results) > 1
    for result in results:
        settings, where = recipe_of_plan(result.candidate.plan, recipe), result.candidate.plan.needed_cluster
        plan = plan_of_recipe(settings, job.model, where)
        assert predict(plan, job.workload, job.cost).step_s == result.prediction.step_s


def test_weights_that_are_stored_in_float64_beside_narrower_products_are_not_guessed(recipe_file):
    """A Plan says what is computed in, and from it follows what is stored."""
    wider, here = ["run.dtype=float64", "fsdp.param_dtype=bfloat16"], JobOptions(ClusterOptions(ranks_per_node=2))
    with pytest.raises(UserError, match=r'beside fsdp.param_dtype = "bfloat16" is not counted: the memory model has'):
        read_recipe_as_plan(recipe_file, wider, here)
    with pytest.raises(UserError, match=r'recompute = "auto" goes by bytes, and run.dtype = "float64" beside'):
        load_recipe(recipe_file, [*wider, "fsdp.recompute=auto"])
    assert read_recipe_as_plan(recipe_file, wider[:1], here)[0].precision == "fp64"


GROUPED = ["data.group=auto", "run.batch_size=4"]


def test_a_recipe_of_groups_is_a_plan_with_their_caps(recipe_file):
    plan, job = read_recipe_as_plan(recipe_file, GROUPED, JobOptions(ClusterOptions(ranks_per_node=2)))
    assert list(plan.microbatch_caps) == ["image", "audio", BACKBONE]
    assert (plan.batch_size, plan.microbatch_size, job.batch_size) == (8, 2, 8)
    recipe = load_recipe(recipe_file, GROUPED)
    settings = recipe_of_plan(plan, recipe)
    assert settings.data.group == plan.microbatch_caps
    assert (settings.run.batch_size, settings.run.microbatches) == (4, 1)
    assert plan_of_recipe(settings, plan.model, plan.cluster, job.workload) == plan
    # A plan without caps trains without groups, on as many examples.
    plain = recipe_of_plan(replace(plan, microbatch_caps={}), recipe)
    assert (plain.data.group, plain.run.batch_size, plain.run.microbatches) == (None, 8, 2)
    with pytest.raises(UserError, match="each of the 3 ranks takes as many: it must be a multiple of 3"):
        read_recipe_as_plan(recipe_file, GROUPED, JobOptions(ClusterOptions(ranks_per_node=3)))


def test_a_simulated_step_of_groups_is_one_that_is_trained(recipe_file):
    plan, job = read_recipe_as_plan(recipe_file, GROUPED, JobOptions(ClusterOptions(ranks_per_node=2)))
    dataset, _ = training_data(load_recipe(recipe_file, GROUPED))
    order = GroupedOrder(phase_totals(dataset), plan.microbatch_caps)
    position, trained, num_left = 0, [], 0
    while position < dataset.num_examples:
        step, num_left = order.step(position, 4), dataset.num_examples - position
        position += len(step.ids)
        trained.append(dataset.batch_lengths(step.ids, 2).sequence.tolist())
    for seed in range(4):
        batch = draw_batch(plan, job.workload, np.random.default_rng(seed))
        drawn = batch.sequence.tolist()
        # What follows the last groups of an epoch is of the next one.
        assert drawn in trained[:-1] or drawn[:num_left] == trained[-1][:num_left]
        step = assign_batch(plan, batch, job.cost, job.balancing)
        for name, cap in plan.microbatch_caps.items():
            items = step.modules[name]
            assert np.bincount(items.batch_index(2), items.length).max() <= cap


def test_lengths_that_have_no_groups_are_grouped_by_the_step(recipe_file):
    """As those of a plan's file are, simulated on any lengths."""
    plan, job = read_recipe_as_plan(recipe_file, GROUPED, JobOptions(ClusterOptions(ranks_per_node=2)))
    alone = replace(job.workload, examples=replace(job.workload.examples, group=None))
    prediction = predict(plan, alone, job.cost)
    assert prediction.num_examples == plan.batch_size and prediction.step_s > 0


def test_the_recipes_cluster_counts_where_no_other_device_is_named(recipe_file):
    stated = ["run.batch_size=64", "cluster.device=a40", "cluster.nodes=2", "cluster.memory_gbytes=40"]
    named = {"none": (None,), "ranks": (None, 1, 2), "the same": ("A40", 1), "another": ("h100", 1)}
    found = {
        how: read_recipe_as_plan(recipe_file, stated, JobOptions(ClusterOptions(*given)))[0].cluster
        for how, given in named.items()
    }
    assert [found[how].num_ranks for how in named] == [8, 2, 4, 8]
    assert [found[how].device.memory_bytes / 1e9 for how in named] == [40, 40, 40, 80]


def test_a_recipe_that_does_not_train_is_sent_to_motet_plan(tmp_path):
    path = tmp_path / "planned.toml"
    path.write_text("[run]\nbatch_size = 8\n")
    with pytest.raises(
        UserError,
        match=r"planned.toml has neither \[data\] nor \[workload\], .*: `motet plan .*planned.toml` finds a plan",
    ):
        read_recipe_as_plan(path, [], JobOptions(ClusterOptions()))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ['data.train=["train.jsonl", "heldout.jsonl"]', "data.mixture=[1.0, 9.0]"],
            "microbatch_caps beside data.mixture, in which each manifest has its own epochs",
        ),
        (["data.shuffle=false"], "microbatch_caps beside data.shuffle = false, as groups take examples at random"),
        (['balance.mode="exchange"'], 'microbatch_caps beside balance.mode = "exchange", whose lengths are not known'),
        (['balance.split="auto"'], 'microbatch_caps beside balance.split = "auto", which gives a sequence to several'),
    ],
)
def test_caps_do_not_train_beside_what_groups_would_leave_out(recipe_file, overrides, said):
    """A plan's caps group the examples of an epoch, in training as data.group does, which a recipe refuses so too."""
    plan = replace(planned_recipe(recipe_file, 3), microbatch_caps={"image": 400, "audio": 400, BACKBONE: 300})
    assert not obstacle(plan, load_recipe(recipe_file))
    recipe = load_recipe(recipe_file, overrides)
    assert obstacle(plan, recipe).startswith(said)
    assert not obstacle(replace(plan, microbatch_caps={}), recipe)
