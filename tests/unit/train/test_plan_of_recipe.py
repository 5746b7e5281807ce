import numpy as np
import pytest

from cli.tiny_job import write_tiny_job
from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.data.text import ChatTokenizer
from motet.models.spec import spec_of_config
from motet.schedule import planned
from motet.schedule.program import Kind
from motet.train.plan_of_recipe import plan_of_recipe, read_recipe_as_plan
from motet.train.recipe import load_recipe


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
        (("fsdp.shard_size=1",), 0, 1),
        (("fsdp.shard_size=2",), 3, 2),
    ],
)
def test_sharding_is_what_fsdp_does(recipe_file, overrides, zero, shard_size):
    (unit,) = planned_recipe(recipe_file, 2, *overrides).units
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


def test_a_recipe_is_planned_with_its_own_data(recipe_file):
    plan, workload = read_recipe_as_plan(recipe_file, ["run.batch_size=32"], "H100", 16, None)
    assert (plan.cluster.num_nodes, plan.cluster.ranks_per_node, plan.units[0].dp) == (2, 8, 16)
    assert workload.examples.num_examples == 40 and np.all(workload.examples.sequence > 0)
    assert read_recipe_as_plan(recipe_file, [], "h100", 3, None)[0].cluster.num_ranks == 3
    on_cpu, _ = read_recipe_as_plan(recipe_file, [], "cpu", 2, None)
    assert not on_cpu.cluster.device.overlaps and plan.cluster.device.overlaps


def test_the_recipes_cluster_counts_where_no_other_device_is_named(recipe_file):
    stated = ["run.batch_size=64", "cluster.device=a40", "cluster.nodes=2", "cluster.memory_gbytes=40"]
    named = {"none": (None, None), "ranks": (None, 2), "the same": ("A40", 4), "another": ("h100", 8)}
    found = {how: read_recipe_as_plan(recipe_file, stated, *given, None)[0].cluster for how, given in named.items()}
    assert [found[how].num_ranks for how in named] == [8, 2, 4, 8]
    assert [found[how].device.memory_bytes / 1e9 for how in named] == [40, 40, 40, 80]


def test_a_recipe_that_does_not_train_is_sent_to_motet_plan(tmp_path):
    path = tmp_path / "planned.toml"
    path.write_text("[run]\nbatch_size = 8\n")
    with pytest.raises(UserError, match=r"planned.toml has no \[data\], .*: `motet plan .*planned.toml` finds a plan"):
        read_recipe_as_plan(path, [], None, None, None)


def test_ranks_come_in_nodes(recipe_file):
    with pytest.raises(UserError, match="--ranks 12: nodes of h100 have 8 ranks"):
        read_recipe_as_plan(recipe_file, [], "h100", 12, None)
    with pytest.raises(UserError, match="--device: there is no device 'h1000'"):
        read_recipe_as_plan(recipe_file, [], "h1000", 8, None)
