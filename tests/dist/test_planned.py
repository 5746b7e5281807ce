"""`motet train RECIPE --plan PLAN.json` on two ranks: losses, messages, what is left out, and resuming elsewhere."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from cli.meddling import motet
from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_bad_media import spoil_clips
from dist.test_executed import traced
from motet.cli import main
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.peer_copies import PeerCopies
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.under_plan import recipe_under_plan
from motet.simulate.bubbles import BUBBLE_KINDS
from motet.train.checkpoint.contents import name_of
from motet.train.recipe.reading import of_phase
from motet.train.recipe.recipe_file import load_recipe
from motet.train.report.beside import MeasuredBeside
from motet.train.trainer import PhaseOfRun, train
from peer_memory import copies
from ranks import free_port, run_ranks

DEEPER = (
    "data.heldout=[]",
    "run.dtype=float64",
    "model.encoders.audio.config.dropout=0.2",
    "model.backbone.config.attention_dropout=0.1",
    "model.encoders.audio.config.encoder_layers=2",
    "model.encoders.image.config.depth=2",
    "model.backbone.config.num_hidden_layers=3",
    "checkpoint.every_steps=4",
)
FEW_CUTS = ({"image": 2, "audio": 1}, {"audio": 1, "backbone": 3})
LATE_CUT = ({"image": 2, "audio": 2, "backbone": 1}, {"backbone": 2})
FOUR_STAGES = ({"image": 2}, {"audio": 2}, {"backbone": 1}, {"backbone": 2})


def plan_of(recipe: Path, stages, **options) -> Plan:
    """A chain in these stages, of the recipe's model as the tests train it. pp: ranks; by default one a stage.

    left_over: ranks of the cluster that it does not use.
    """
    dp, pp = options.pop("dp", 1), options.pop("pp", len(stages))
    where = cluster("h100", 1, dp * pp + options.pop("left_over", 0))
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    recompute, zero = options.pop("recompute", ()), options.pop("zero", 1)
    unit = Unit("all", stages, pp=pp, dp=dp, recompute=recompute, zero=zero)
    model = read_job_recipe(recipe, DEEPER).model
    return Plan(model, replace(where, device=device), (unit,), 6, 2 // dp, precision="fp64", **options)


def train_under(rank, num_ranks, recipe, overrides, plan, resume="auto"):
    path = Path(recipe)
    read, chosen = load_recipe(path, overrides), None
    if plan is not None:
        read, chosen = recipe_under_plan(read, path, Path(plan))
    train(read, resume=resume, trace=True, chosen=chosen)


def said_under(*arguments):
    with redirect_stdout(StringIO()) as said:
        train_under(*arguments)
    return said.getvalue()


def said_of_few(*arguments):
    """As `said_under`, where the log compares steps after four of them."""
    MeasuredBeside.__init__.__defaults__ = (4,)
    return said_under(*arguments)


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """A run of one process: what every Plan must equal."""
    run_dir = tmp_path_factory.mktemp("alone")
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={run_dir}"], None)
    return run_dir


def run_planned(job, tmp_path, plan, *more, resume="auto"):
    file, run_dir = tmp_path / "plan.json", tmp_path / "run"
    write_plan(plan, file)
    num_ranks = max(unit.ranks.stop for unit in plan.units)
    overrides = [*DEEPER, f"run.dir={run_dir}", *more]
    run_ranks(train_under, num_ranks, str(job), overrides, str(file), resume)
    return run_dir


def check_reloads(run_dir, plan):
    """The recipe that a run wrote is accepted again, with the same plan."""
    dumped = run_dir / "recipe.toml"
    recipe = load_recipe(dumped)
    assert recipe.run.plan == plan and recipe_under_plan(recipe, dumped, plan)[1].plan.batch_size == 6


def row_of(plan_file, job, rank, monkeypatch, capsys):
    """The actions that `motet simulate PLAN --actions RANK` prints."""
    given = ["motet", "simulate", str(plan_file), "--workload", str(job), "--actions", str(rank)]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def train_with_copies(rank, num_ranks, *arguments):
    """As `train_under`, with memory that CPU ranks share in place of that of GPUs. Returns how many messages it had."""
    num_messages = []

    class Counted(PeerCopies):
        def _read(self, *arguments):
            num_messages.append(1)
            super()._read(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peer_memory.PeerCopies", Counted)
        patch.setattr("motet.train.planned_job.check_device", lambda device: None)
        patch.setattr("motet.train.planned_job.open_copies", lambda group, device, limit: copies(group))
        train_under(rank, num_ranks, *arguments)
    return len(num_messages)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "data_parallel"])
def test_pieces_of_products_that_are_copied_train_as_those_that_are_sent(job, tmp_path, schedule):
    """With two ranks a sum has one order, so that not a bit differs."""
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 3},), dp=2, schedule=schedule)
    where = replace(plan.cluster, device=replace(plan.cluster.device, overlaps=True), tensor_pieces=2)
    plan = replace(plan, units=(replace(plan.units[0], dp=1, tp=2),), microbatch_size=2, cluster=where)
    found = []
    for transport, trained in (("collectives", train_under), ("copy_engines", train_with_copies)):
        run_dir, file = tmp_path / transport, tmp_path / f"{transport}.json"
        write_plan(replace(plan, cluster=replace(where, tensor_transport=transport)), file)
        num_messages = run_ranks(trained, 2, str(job), [*DEEPER, f"run.dir={run_dir}"], str(file))
        found.append([(step["loss"], step["grad_norm"], step["bytes"]) for step in metrics(run_dir)])
    assert found[0] == found[1] and num_messages[0] == num_messages[1] > 0


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (FEW_CUTS, {}),
        pytest.param(
            LATE_CUT,
            {"schedule": "gpipe", "recompute": ({"image": 1, "backbone": 1}, {"backbone": 2})},
            marks=pytest.mark.slow,
        ),
        pytest.param(FEW_CUTS, {"dp": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param(
            FOUR_STAGES,
            {"schedule": "interleaved_1f1b", "deferred_warmup": True, "pp": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(LATE_CUT, {"schedule": "zb_h1", "left_over": 1}, marks=pytest.mark.slow),
        pytest.param(
            FOUR_STAGES,
            {"schedule": "zb_v", "pp": 2, "recompute": ({"image": 1}, {}, {"backbone": 1}, {})},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1f1b", "gpipe, recomputed", "ZeRO 3", "interleaved, deferred", "zb_h1, a rank more", "zb_v, recomputed"],
)
def test_a_plan_trains_as_one_process_does(job, alone, tmp_path, monkeypatch, capsys, stages, options):
    plan = plan_of(job, stages, **options)
    run_dir = run_planned(job, tmp_path, plan)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    norms = [[step["grad_norm"] for step in metrics(each)] for each in (run_dir, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)
    assert len({step["plan"] for step in metrics(run_dir)}) == 1
    assert all(step["exchange"]["bytes"] > 0 and step["exchange"]["seconds"] is None for step in metrics(run_dir))
    assert all(step["bytes"]["p2p"] == step["exchange"]["bytes"] for step in metrics(run_dir))
    assert {kind for step in metrics(run_dir) for kind, sent in step["bytes"].items() if sent} == (
        {"p2p", "gather", "reduce"} if options.get("dp", 1) > 1 else {"p2p"}
    )
    check_reloads(run_dir, tmp_path / "plan.json")
    found = traced(run_dir)
    for rank in plan.units[0].ranks:
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        for step in range(8):
            assert [name for name, _, _ in found[rank, step]] == expected


ENCODERS = Unit("encoders", ({"image": 2, "audio": 2},), dp=2, zero=0)
IMAGE_ALONE = Unit("image", ({"image": 2},), zero=0)
IN_TENSORS = Unit("llm", ({"audio": 2, "backbone": 3},), first_rank=1, tp=2, zero=0)
COPIES = Unit("llm", ({"backbone": 1}, {"backbone": 2}), pp=2, zero=0, replicated=("image", "audio"))


@pytest.mark.parametrize(
    ("units", "balance"),
    [
        ((ENCODERS, Unit("llm", ({"backbone": 3},), first_rank=2)), "per_phase"),
        pytest.param((COPIES,), "off", marks=pytest.mark.slow),
        pytest.param((IMAGE_ALONE, IN_TENSORS), "off", marks=pytest.mark.slow),
    ],
    ids=["two replicas of encoders share items", "each stage has the encoders", "tensor parallelism"],
)
def test_encoders_of_several_ranks_train_as_one_process_does(job, alone, tmp_path, monkeypatch, capsys, units, balance):
    """And a run in one process goes on from there."""
    chain, num_ranks = plan_of(job, FEW_CUTS), sum(unit.num_ranks for unit in units)
    here = replace(chain.cluster, ranks_per_node=num_ranks)
    plan = replace(chain, units=units, microbatch_size=1, cluster=here, balance=balance)
    run_dir, back = run_planned(job, tmp_path, plan), tmp_path / "back"
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={back}"], None, str(run_dir / "checkpoints" / name_of(4)))
    assert [step["loss"] for step in metrics(back)] == pytest.approx(losses(alone)[4:], rel=1e-10)
    found = traced(run_dir)
    for rank in range(num_ranks):
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        assert all([name for name, _, _ in found[rank, step]] == expected for step in range(8))


@pytest.mark.parametrize(
    "is_known", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["for this device", "for another"]
)
def test_the_measured_step_stands_beside_the_predicted_one(job, tmp_path, is_known):
    """On the device that the Plan is for; for another one nothing is made up, and one line says so."""
    plan = plan_of(job, FEW_CUTS)
    if is_known:
        device = replace(plan.cluster.device, name="cpu")
        plan = replace(plan, cluster=replace(plan.cluster, device=device))
    file, run_dir = tmp_path / "plan.json", tmp_path / "run"
    write_plan(plan, file)
    overrides = [*DEEPER, f"run.dir={run_dir}", "run.steps=6", "checkpoint.every_steps=0"]
    said, _ = run_ranks(said_of_few, 2, str(job), overrides, str(file))
    steps, summary = metrics(run_dir), json.loads((run_dir / "summary.json").read_text())
    assert all(0 < step["bound_s"] < step["makespan_s"] for step in steps)
    assert all(step["regret"] == pytest.approx(step["step_s"] / step["bound_s"] - 1) for step in steps)
    assert all(step["bubbles_s"].keys() == set(BUBBLE_KINDS) for step in steps)
    page = (run_dir / "report.html").read_text()
    assert page.count("<iframe") == 1 + is_known and "Step 6, measured and predicted" in page
    if is_known:
        assert all(step["predicted_s"] > 0 for step in steps)
        assert summary["makespan_error"] == pytest.approx(summary["measured_s"] / summary["predicted_s"] - 1)
        assert summary["bubbles"]["predicted"].keys() == summary["bubbles"]["measured"].keys()
        assert said.count("After 4 steps: a step takes") == 1
        assert re.search(
            r"s was predicted at a speed that is assumed, as nothing was profiled here\. Plan anew: ", said
        )
        assert "(+" not in said and "% of the predicted time" not in page
        assert "forward image+audio" in said and f"--profile {run_dir / 'profile.json'}" in said
    else:
        assert all(step["predicted_s"] is None for step in steps) and summary["makespan_error"] is None
        assert said.count("Steps are not predicted") == 1 and "has figures of h100, this run is on cpu" in said


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"dp": 2, "zero": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "zero": 3}, marks=pytest.mark.slow),
        {"dp": 2, "tp": 2, "zero": 3},
        pytest.param({"tp": 2, "zero": 0}, marks=pytest.mark.slow),
    ],
    ids=["gathered once", "gathered in each pass", "shared products", "shared products, whole copies"],
)
def test_a_plan_of_data_parallelism_trains_too(job, alone, tmp_path, degrees):
    """And a run in one process goes on from there."""
    chain = plan_of(job, FEW_CUTS)
    unit = Unit("all", (chain.model.num_blocks,), **degrees)
    here = replace(chain.cluster, ranks_per_node=unit.num_ranks)
    plan = replace(chain, units=(unit,), microbatch_size=1, schedule="data_parallel", balance="per_phase", cluster=here)
    run_dir, back = run_planned(job, tmp_path, plan), tmp_path / "back"
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    norms = [[step["grad_norm"] for step in metrics(each)] for each in (run_dir, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)
    assert len({step["plan"] for step in metrics(run_dir)} - {None}) == 1
    check_reloads(run_dir, tmp_path / "plan.json")
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={back}"], None, str(run_dir / "checkpoints" / name_of(4)))
    assert [step["loss"] for step in metrics(back)] == pytest.approx(losses(alone)[4:], rel=1e-10)


def as_torchrun_starts(num_ranks, ranks_per_node, *words):
    """What each rank of a command becomes where no agent serves the store."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    where |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(ranks_per_node)}

    def run(rank):
        return motet(*words, environment=where | {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_node)})

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


@pytest.mark.parametrize(
    ("in_stages", "nodes", "first_rank"),
    [
        (True, 2, 1),
        pytest.param(True, 2, 0, marks=pytest.mark.slow),
        pytest.param(False, 2, 0, marks=pytest.mark.slow),
        pytest.param(True, 1, 1, marks=pytest.mark.slow),
        pytest.param(False, 2, 2, marks=pytest.mark.slow),
        pytest.param(False, 2, 1, marks=pytest.mark.slow),
    ],
    ids=[
        "of the first node",
        "of the last node",
        "of the last node, all modules on each",
        "before others",
        "a node before others",
        "of the first node, all modules on each",
    ],
)
def test_ranks_that_a_plan_leaves_over_end_at_once(job, alone, tmp_path, in_stages, nodes, first_rank):
    """Four ranks, as torchrun starts them, under a Plan for three or two."""
    plan = plan_of(job, ({"image": 2}, {"audio": 2, "backbone": 1}, {"backbone": 2}))
    plan = replace(plan, cluster=replace(plan.cluster, num_nodes=nodes, ranks_per_node=4 // nodes))
    if in_stages:
        plan = replace(plan, units=(replace(plan.units[0], first_rank=first_rank),))
    else:
        whole = Unit("all", (plan.model.num_blocks,), dp=2 if first_rank == 2 else 3, zero=2, first_rank=first_rank)
        plan = replace(plan, units=(whole,), microbatch_size=1, schedule="data_parallel", balance="joint")
    file, run_dir = tmp_path / "plan.json", tmp_path / "run"
    write_plan(plan, file)
    given = [word for override in (*DEEPER, f"run.dir={run_dir}") for word in ("--set", override)]
    ranks = as_torchrun_starts(4, 4 // nodes, "train", str(job), *given, "--plan", str(file))
    assert [done.returncode for done in ranks] == [0] * 4, ranks
    said = f"The plan uses {len(plan.ranks)} of 4 ranks; the others have ended."
    assert said in ranks[first_rank].stdout
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)


@pytest.mark.slow
def test_ranks_that_the_plan_of_a_phase_leaves_over_come_to_the_next_one(job, tmp_path):
    """The second of three phases runs on both ranks, the others on one alone."""
    phases = "".join(f'[[run.phase]]\nname = "{name}"\nsteps = 2\n\n' for name in "abc")
    recipe = job.with_name("phased.toml")
    recipe.write_text(job.read_text().replace("steps = 8\n", "").replace("[data]\n", f"{phases}[data]\n", 1))
    whole = ({"image": 2, "audio": 2, "backbone": 3},)
    one, two = plan_of(job, whole, left_over=1), plan_of(job, whole, dp=2)
    files = [tmp_path / f"{name}.json" for name in "abc"]
    for file, plan in zip(files, (replace(one, units=(replace(one.units[0], first_rank=1),)), two, one), strict=True):
        write_plan(plan, file)
    sets = [word for each in DEEPER[:-1] for word in ("--set", each)]
    plans = [word for file in files for word in ("--plan", str(file))]
    ranks = as_torchrun_starts(2, 2, "train", str(recipe), *sets, "--set", f"run.dir={tmp_path / 'run'}", *plans)
    assert [done.returncode for done in ranks] == [0, 0], ranks
    said = "The plan uses 1 of 2 ranks; the others wait for the end of the phase."
    assert [done.stdout.count(said) for done in ranks] == [1, 1]
    run_ranks(train_in_phases, 1, str(recipe), [*DEEPER[:-1], f"run.dir={tmp_path / 'alone'}"])
    for name in "abc":
        assert losses(tmp_path / "run" / name) == pytest.approx(losses(tmp_path / "alone" / name), rel=1e-10)


def train_in_phases(rank, num_ranks, recipe, overrides):
    for number, name in enumerate("abc", start=1):
        train(load_recipe(Path(recipe), of_phase(overrides, name)), phase=PhaseOfRun(name, number, 3))


@pytest.mark.slow
def test_a_plan_trains_in_the_types_of_the_recipe(job, tmp_path):
    """bf16 over float32, as under data parallelism; the checkpoint has float32."""
    types = ["run.dtype=float32", "fsdp.param_dtype=bfloat16", "fsdp.reduce_dtype=float32", "run.steps=4"]
    run_ranks(train_under, 1, str(job), [*DEEPER, *types, f"run.dir={tmp_path / 'alone'}"], None)
    plan = replace(plan_of(job, ({"image": 2, "audio": 2, "backbone": 3},), dp=2, zero=1), precision="bf16")
    planned = run_planned(job, tmp_path, plan, *types)
    assert losses(planned) == pytest.approx(losses(tmp_path / "alone"), rel=1e-2)
    resume = [*DEEPER, *types[:-1], "run.steps=6", f"run.dir={tmp_path / 'on'}"]
    run_ranks(train_under, 1, str(job), resume, None, str(planned / "checkpoints" / name_of(4)))
    assert [step["step"] for step in metrics(tmp_path / "on")] == [5, 6]


def test_a_run_goes_on_under_another_plan(job, alone, tmp_path):
    """From one process to a chain, from ZeRO 3 to ZeRO 1, and back: the same losses as never having stopped."""
    first = run_planned(job, tmp_path, plan_of(job, FEW_CUTS), resume=str(alone / "checkpoints" / name_of(4)))
    assert [step["loss"] for step in metrics(first)] == pytest.approx(losses(alone)[4:], rel=1e-10)
    whole, back = {"image": 2, "audio": 2, "backbone": 3}, tmp_path / "back"
    for zero in (3, 1):
        (tmp_path / f"zero{zero}").mkdir()
    shared = run_planned(job, tmp_path / "zero3", plan_of(job, (whole,), dp=2, zero=3))
    resume = str(shared / "checkpoints" / name_of(4))
    last = run_planned(job, tmp_path / "zero1", plan_of(job, FOUR_STAGES, schedule="zb_v", pp=2), resume=resume)
    assert [step["loss"] for step in metrics(last)] == pytest.approx(losses(alone)[4:], rel=1e-10)
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={back}"], None, resume)
    assert [step["loss"] for step in metrics(back)] == pytest.approx(losses(alone)[4:], rel=1e-10)


@pytest.mark.slow
def test_a_mixture_is_trained_and_stored_under_a_plan_too(tmp_path):
    """A run that goes on without the mixture has another order of examples, whatever it was trained under before."""
    job = write_tiny_job(tmp_path / "data")
    lines = (job.parent / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("small", lines[:5]), ("large", lines[5:])):
        (job.parent / f"{name}.jsonl").write_text("".join(part))
    mixed = [*DEEPER, 'data.train=["small.jsonl", "large.jsonl"]', "data.mixture=[2, 1]"]
    alone = tmp_path / "alone"
    run_ranks(train_under, 1, str(job), [*mixed, f"run.dir={alone}"], None)
    planned = run_planned(job, tmp_path, plan_of(job, FEW_CUTS), *mixed[len(DEEPER) :])
    assert losses(planned) == pytest.approx(losses(alone), rel=1e-10)
    resume = str(planned / "checkpoints" / name_of(4))
    overrides = [*mixed[:-1], f"run.dir={tmp_path / 'other'}"]
    with pytest.raises(Exception, match=r"written with a data\.mixture in the proportion"):
        run_ranks(train_under, 1, str(job), overrides, None, resume)


@pytest.mark.slow
def test_clips_that_are_not_finite_are_left_out_on_all_ranks(tmp_path):
    """Rank 0 alone reads media; rank 1, which reads tokens, leaves out the same examples."""
    job = write_tiny_job(tmp_path / "data")
    spoil_clips(job.parent, "train-*.wav", 8)
    overrides = [*DEEPER, "data.max_bad_fraction=1.0", "run.steps=4"]
    run_ranks(train_under, 1, str(job), [*overrides, f"run.dir={tmp_path / 'alone'}"], None)
    run_dir = run_planned(job, tmp_path, plan_of(job, LATE_CUT), *overrides)
    assert metrics(run_dir)[-1]["bad_examples"] > 0
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
