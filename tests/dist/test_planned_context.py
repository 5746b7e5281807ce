"""`motet train RECIPE --plan PLAN.json` where ranks share sequences: losses, rows, and what is refused."""

import json
from dataclasses import replace

import pytest

from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_bad_media import spoil_clips
from dist.test_executed import traced
from dist.test_planned import DEEPER, FEW_CUTS, plan_of, row_of, run_planned, train_under
from motet.core.errors import UserError
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.dispatch.context import ContextConfig
from motet.planning.trainable import obstacle
from motet.train.checkpoint.contents import name_of
from motet.train.planned_job import check_context, impossible_cut
from motet.train.recipe.recipe_file import load_recipe
from parity.planned import build_hf_model
from ranks import run_ranks

WHOLE = ({"image": 2, "audio": 2, "backbone": 3},)


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone")
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={run_dir}"], None)
    return run_dir


@pytest.fixture(scope="module")
def alone_in_pairs(job, tmp_path_factory):
    """Steps of two examples: the longer one is most of an even share of both."""
    run_dir = tmp_path_factory.mktemp("alone_in_pairs")
    run_ranks(train_under, 1, str(job), [*DEEPER, "run.batch_size=2", f"run.dir={run_dir}"], None)
    return run_dir


def shared(job, stages=WHOLE, **options):
    """A chain whose ranks share sequences in pairs."""
    chain, unit = plan_of(job, FEW_CUTS), Unit("all", stages, pp=len(stages), cp=2, **options)
    where = replace(chain.cluster, ranks_per_node=unit.num_ranks)
    return replace(chain, units=(unit,), microbatch_size=1, cluster=where)


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        pytest.param(WHOLE, ("context.exchange=group_cast", "context.head_groups=2"), marks=pytest.mark.slow),
        pytest.param(FEW_CUTS, ("context.exchange=ulysses",), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_sequences_train_as_one_process_does(
    job, alone, tmp_path, monkeypatch, capsys, stages, settings
):
    """And a run in one process goes on from there."""
    plan, back = shared(job, stages), tmp_path / "back"
    run_dir = run_planned(job, tmp_path, plan, *settings)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    norms = [[step["grad_norm"] for step in metrics(each)] for each in (run_dir, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)
    assert all(step["bytes"]["exchange"] > 0 and step["bytes"]["reduce"] > 0 for step in metrics(run_dir))
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={back}"], None, str(run_dir / "checkpoints" / name_of(4)))
    assert [step["loss"] for step in metrics(back)] == pytest.approx(losses(alone)[4:], rel=1e-10)
    found = traced(run_dir)
    for rank in range(plan.cluster.num_ranks):
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        assert all([name for name, _, _ in found[rank, step]] == expected for step in range(8))


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "cp"), [(WHOLE, 1), (FEW_CUTS, 1), (WHOLE, 2)])
def test_replicas_that_share_sequences_train_as_one_process_does(
    job, alone_in_pairs, tmp_path, monkeypatch, capsys, stages, cp
):
    plan = shared(job, stages, dp=2)
    plan = replace(plan, units=(replace(plan.units[0], cp=cp),), balance="split", batch_size=2)
    plan = replace(plan, cluster=replace(plan.cluster, ranks_per_node=plan.units[0].num_ranks))
    run_dir = run_planned(job, tmp_path, plan, "run.batch_size=2")
    assert losses(run_dir) == pytest.approx(losses(alone_in_pairs), rel=1e-10)
    steps = metrics(run_dir)
    cuts = [step["balance"]["cut"] for step in steps if step["balance"]["cut"] is not None]
    assert any(cut["sequences"] for cut in cuts) and all(set(cut["degrees"]) <= {"2"} for cut in cuts)
    items = [item for step in steps for item in step["cuts"]]
    assert items and all(item["why"] == "more than an even share of its microbatch" for item in items)
    found = traced(run_dir)
    for rank in range(plan.cluster.num_ranks):
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        assert all([name for name, _, _ in found[rank, step]] == expected for step in range(8))


@pytest.mark.parametrize(
    ("stages", "order", "batch_size", "bad"),
    [(WHOLE, "given", 2, 0), pytest.param(FEW_CUTS, "both", 6, 6, marks=pytest.mark.slow)],
    ids=["as they come", "in an order, with bad clips"],
)
def test_a_step_that_cuts_sequences_says_what_that_gains(tmp_path, stages, order, batch_size, bad):
    """Of all its cuts, by the figures of the device that it is on. For others nothing is predicted."""
    job = write_tiny_job(tmp_path / "data")
    if bad:
        spoil_clips(job.parent, "train-*.wav", bad)
    plan = replace(shared(job, stages, dp=2), balance="split", batch_size=batch_size, order=order)
    device = replace(plan.cluster.device, name="cpu")
    plan = replace(plan, units=(replace(plan.units[0], cp=1),))
    plan = replace(plan, cluster=replace(plan.cluster, device=device, ranks_per_node=plan.units[0].num_ranks))
    run_dir = run_planned(job, tmp_path, plan, f"run.batch_size={batch_size}", "checkpoint.every_steps=0")
    steps = metrics(run_dir)
    cut = [step for step in steps if step["balance"]["cut"] is not None]
    assert cut and (sum(len(step["left_out"]) for step in steps) > 0) == bool(bad)
    for step in cut:
        gained_s = step["balance"]["cut"]["gained_s"]
        assert gained_s and abs(gained_s) < step["predicted_s"]
        assert step["cuts"] and all(item["gain_s"] == gained_s for item in step["cuts"])
    said = json.loads((run_dir / "summary.json").read_text())["balance"]["cut"]
    assert said["gained_s"] == pytest.approx(sum(step["balance"]["cut"]["gained_s"] for step in cut))


@pytest.mark.slow
def test_replicas_of_encoders_that_share_items_train_as_one_process_does(
    job, alone_in_pairs, tmp_path, monkeypatch, capsys
):
    """Beside a backbone of one replica. A step says what it cut, and what that gains."""
    units = Unit("encoders", ({"image": 2, "audio": 2},), dp=2), Unit("llm", ({"backbone": 3},), first_rank=2)
    plan = replace(shared(job), units=units, balance="split", batch_size=2)
    where = replace(plan.cluster, device=replace(plan.cluster.device, name="cpu"), ranks_per_node=3)
    run_dir = run_planned(job, tmp_path, replace(plan, cluster=where), "run.batch_size=2", "checkpoint.every_steps=0")
    assert losses(run_dir) == pytest.approx(losses(alone_in_pairs), rel=1e-10)
    steps = metrics(run_dir)
    cut = [step for step in steps if step["balance"]["cut"] is not None]
    assert cut and all(step["bytes"]["exchange"] > 0 for step in cut)
    for step in cut:
        gained_s = step["balance"]["cut"]["gained_s"]
        assert step["balance"]["cut"]["sequences"] == 0 and gained_s and abs(gained_s) < step["predicted_s"]
        assert {item["module"] for item in step["cuts"]} <= {"image", "audio"}
        assert all(item["ranks"] == 2 and item["gain_s"] == gained_s for item in step["cuts"])
    found = traced(run_dir)
    for rank in range(3):
        expected = row_of(tmp_path / "plan.json", job, rank, monkeypatch, capsys)
        assert all([name for name, _, _ in found[rank, step]] == expected for step in range(8))


def test_what_replicas_that_share_sequences_cannot_do_is_refused(job):
    model, plan = build_hf_model(), replace(shared(job, dp=2), balance="split")
    plan = replace(plan, units=(replace(plan.units[0], cp=1),))
    assert obstacle(plan, load_recipe(job, DEEPER)) == impossible_cut(model, plan) == ""
    check_context(plan, ContextConfig(exchange="group_cast", head_groups=2))
    with pytest.raises(UserError, match=r"exchange is 'all_gather', and replicas that share .* by 'group_cast'; set"):
        check_context(plan, ContextConfig(exchange="all_gather"))


@pytest.mark.parametrize("has_plan", [False, True])
def test_an_exchange_without_ranks_that_share_sequences_is_refused(job, tmp_path, has_plan):
    file = tmp_path / "plan.json"
    write_plan(plan_of(job, FEW_CUTS), file)
    overrides = [*DEEPER, "context.exchange=ulysses", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(Exception, match=r"context\.exchange is 'ulysses', but no ranks share a sequence: leave it out"):
        run_ranks(train_under, 2, str(job), overrides, str(file) if has_plan else None)


def test_heads_that_ranks_do_not_divide_are_refused_for_ulysses(job):
    plan = shared(job)
    check_context(plan, ContextConfig(exchange="ulysses"))
    plan = replace(plan, units=(replace(plan.units[0], cp=3),))
    check_context(plan, ContextConfig())
    with pytest.raises(UserError, match=r"the 3 context-parallel ranks \(cp\) of unit 'all' do not divide the 2 heads"):
        check_context(plan, ContextConfig(exchange="ulysses"))


def test_groups_of_heads_are_refused_where_they_are_none(job):
    """Two heads of keys and values, of which two tensor-parallel ranks have one each."""
    plan = shared(job)
    in_groups = ContextConfig(exchange="all_gather", head_groups=2)
    check_context(plan, in_groups)
    with pytest.raises(UserError, match=r"head_groups is 3, and does not divide the 2 heads of keys and values of a"):
        check_context(plan, in_groups.model_copy(update={"head_groups": 3}))
    for degrees, why in (({"tp": 2}, "does not divide the 1 head "), ({"cp": 1}, "but no ranks share a sequence")):
        with pytest.raises(UserError, match=why):
            check_context(replace(plan, units=(replace(plan.units[0], **degrees),)), in_groups)
    for exchange in ("auto", "ulysses"):
        with pytest.raises(UserError, match=rf'head_groups = 2 .* exchange = "{exchange}" .*; set exchange ='):
            load_recipe(job, [*DEEPER, f"context.exchange={exchange}", "context.head_groups=2"])
