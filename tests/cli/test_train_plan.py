"""`motet train RECIPE --plan PLAN.json`: what does not agree, or cannot be trained, is one sentence and exit code 2."""

import json
import sys

import pytest

from cli.on_ranks import motet_on_ranks
from cli.tiny_job import write_tiny_job
from dist.test_planned import FEW_CUTS, plan_of
from motet.cli import main
from motet.core.plan_file import write_plan

AS_PLANNED = (
    "data.heldout=[]",
    "run.dtype=float64",
    "model.encoders.audio.config.encoder_layers=2",
    "model.encoders.image.config.depth=2",
    "model.backbone.config.num_hidden_layers=3",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data")
    write_plan(plan_of(recipe, FEW_CUTS), recipe.with_name("plan.json"))
    return recipe


@pytest.fixture
def refused(job, tmp_path, monkeypatch, capsys):
    """Trains with overrides under the plan, changed; returns the one sentence."""

    def run(*overrides, command="train", options=(), **change):
        plan = json.loads(job.with_name("plan.json").read_text()) | change
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan))
        sets = [word for one in (f"run.dir={tmp_path / 'run'}", *AS_PLANNED, *overrides) for word in ("--set", one)]
        monkeypatch.setattr(sys, "argv", ["motet", command, str(job), "--plan", str(file), *sets, *options])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 2
        (sentence,) = capsys.readouterr().err.strip().splitlines()
        return sentence.replace(str(tmp_path), "").replace(str(job), "RECIPE")

    return run


@pytest.mark.parametrize(
    ("overrides", "change", "said"),
    [
        (["run.microbatches=3"], {}, "sets run.microbatches, which the plan /plan.json decides; remove it."),
        (["fsdp.recompute=true"], {}, "sets fsdp.recompute, which the plan"),
        (["balance.method=joint"], {}, "sets balance.method, which the plan"),
        (
            ["balance.split=auto"],
            {},
            "decides; remove it; a plan with stages cuts long sequences, and items of encoders on",
        ),
        (["balance.method=split"], {}, "sets balance.method, which the plan /plan.json decides; remove it; a plan"),
        (["run.batch_size=12"], {}, "is for run.batch_size = 6, and the recipe has 12; plan anew: motet plan RECIPE"),
        (["run.dtype=float32"], {}, "is for precision = fp64, and the recipe has fp32; plan anew: motet plan RECIPE"),
        (
            ["optimizer.name=sgd"],
            {},
            "is for moments of the optimizer = 2, and the recipe has 1; plan anew: motet plan",
        ),
        (
            ["model.backbone.config.num_hidden_layers=4"],
            {},
            "has blocks image 2, audio 2, backbone 3, the recipe's has image 2, audio 2, backbone 4",
        ),
        (["model.backbone.config.intermediate_size=64"], {}, "(layers of backbone differ); plan anew: motet plan"),
        ([], {}, "is for 2 ranks, and 1 run; start torchrun with 2 ranks, or plan anew: motet plan RECIPE --set"),
        ([], {}, "--set run.dtype=float64 --set"),
        ([], {}, "--cluster h100 --nodes 1 --ranks-per-node 1 --trainable --out /plan.json."),
        (["run.batch_size=12"], {}, "--nodes 1 --ranks-per-node 2 --trainable --out /plan.json."),
        ([], {"schedules": "1f1b"}, "'schedules'"),
        (
            ["parallel.image.pp=2"],
            {},
            "plan.json: image has pp = 1, not 2 as in [parallel] of RECIPE; plan anew: motet",
        ),
        (
            ["run.compile=true"],
            {"schedule": "zb_h1"},
            "plan.json has schedule 'zb_h1' beside run.compile, whose backward passes are not split; remove one",
        ),
        (["parallel.video.pp=2"], {}, "parallel.video has no effect, as the model has no such module; it has image, "),
        (["parallel.image.stages=2"], {}, "unknown key 'parallel.image.stages'"),
    ],
)
def test_what_does_not_agree_is_one_sentence(refused, overrides, change, said):
    assert said in refused(*overrides, **change)


def test_pieces_are_those_of_the_plan_where_ranks_share_products(refused, job):
    units = json.loads(job.with_name("plan.json").read_text())["units"]
    unit = {**units[0], "tp": 2, "pp": 1, "stages": [{"image": 2, "audio": 2, "backbone": 3}]}
    pieces = 'cluster={ device = "h100", tensor_pieces = 4 }'
    assert "is for cluster.tensor_pieces = 1, and the recipe has 4; plan anew" in refused(pieces, units=[unit])


def _copied(job, **changes):
    """What changes the Plan to one whose ranks share products, and copy their pieces. changes: of its cluster."""
    plan = json.loads(job.with_name("plan.json").read_text())
    unit = {**plan["units"][0], "tp": 2, "pp": 1, "stages": [{"image": 2, "audio": 2, "backbone": 3}]}
    cluster = {**plan["cluster"], "tensor_pieces": 2, "tensor_transport": "copy_engines", **changes}
    return {"units": [unit], "cluster": {**cluster, "device": {**cluster["device"], "overlaps": True}}}


def test_copies_between_gpus_are_those_of_the_plan(refused, job):
    stated = 'cluster={ device = "h100", tensor_pieces = 2, tensor_transport = "copy_engines" }'
    said = "is for cluster.tensor_transport = collectives, and the recipe has copy_engines; plan anew: motet plan"
    assert said in refused(stated, **_copied(job, tensor_transport="collectives"))
    said = "'cluster.tensor_transport' must be 'collectives' or 'copy_engines', not \"engines\""
    assert said in refused(**_copied(job, tensor_transport="engines"))
    said = (
        "'cluster' is wrong: tensor_transport is 'copy_engines', by which pieces of products travel, and tensor_pieces"
    )
    assert said in refused(**_copied(job, tensor_pieces=1))


def test_copies_are_made_inside_a_node(refused, job):
    assert refused(**_copied(job, num_nodes=2, ranks_per_node=1)).startswith(
        "/plan.json has tensor_transport 'copy_engines', which copies inside a node, beside ranks 0 to 1 of unit "
        "'all', which share products (tp) between nodes, which training cannot run yet; plan anew: motet plan"
    )


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("data_parallel", marks=pytest.mark.slow)])
def test_copies_need_gpus(job, tmp_path, schedule):
    """All ranks say so alike, before anything is read, or built."""
    plan = json.loads(job.with_name("plan.json").read_text()) | _copied(job) | {"schedule": schedule}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    sets = [word for one in (f"run.dir={tmp_path / 'run'}", *AS_PLANNED) for word in ("--set", one)]
    ended = motet_on_ranks(2, "train", job, "--plan", tmp_path / "plan.json", *sets)
    assert ended.returncode == 2
    (said,) = set(ended.stderr.splitlines())  # By each: which of them speaks under torchrun is tested in test_crash.py.
    assert said == (
        'The plan\'s cluster has tensor_transport "copy_engines", by which tensor-parallel ranks read each '
        "other's memory, and this run is on cpu, not on CUDA devices; plan with cluster.tensor_transport = "
        '"collectives".'
    )


def test_pieces_of_products_that_no_ranks_share_are_said_to_have_no_effect(job, tmp_path):
    """The recipe still trains: it may be planned with them, too."""
    said = "cluster.tensor_pieces = 4 has no effect on this run: it cuts products that ranks share, and "
    stated = (f"run.dir={tmp_path}", *AS_PLANNED, "run.steps=1", 'cluster={ device = "h100", tensor_pieces = 4 }')
    sets = [word for one in stated for word in ("--set", one)]
    alone = motet_on_ranks(1, "train", job, *sets)
    assert alone.returncode == 0 and alone.stdout.count(f"{said}without a plan none do.") == 1
    under = motet_on_ranks(2, "train", job, "--plan", job.with_name("plan.json"), "--resume", "never", *sets)
    assert under.returncode == 0 and under.stdout.count(f"{said}no unit of the plan has tp above 1.") == 1


def dry_run(job, run_dir, monkeypatch, capsys, *options):
    sets = [word for one in (f"run.dir={run_dir}", *AS_PLANNED) for word in ("--set", one)]
    monkeypatch.setattr(sys, "argv", ["motet", "train", str(job), "--dry-run", *options, *sets])
    with pytest.raises(SystemExit) as exit_:
        main()
    said = capsys.readouterr()
    return exit_.value.code or 0, said.out, said.err


def test_a_dry_run_under_a_plan_shows_the_blocks_and_bytes_of_each_rank(job, tmp_path, monkeypatch, capsys):
    """As `motet simulate` has them of the same steps, before anything is built, from one process."""
    run_dir, plan = tmp_path / "run", job.with_name("plan.json")
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = dry_run(job, run_dir, monkeypatch, capsys, "--plan", str(plan))
    assert code == 0 and not run_dir.exists()
    assert "│ image 0-1, audio 0 " in out and "│ audio 1, backbone 0-2 " in out
    assert "in the fullest of the first 6 steps" in out and "the blocks of its stages" in out
    named = dry_run(job, run_dir, monkeypatch, capsys, "--set", "run.plan=plan.json")
    assert named == (code, out, "")
    code, out, _ = dry_run(job, run_dir, monkeypatch, capsys, "--plan", str(plan), "--json", "-")
    bytes_of = json.loads(out)["peak_bytes"]
    assert code == 0 and len(bytes_of) == 2 and bytes_of[1] > bytes_of[0]


def test_a_dry_run_refuses_a_plan_that_does_not_fit(job, tmp_path, monkeypatch, capsys):
    small, plan = tmp_path / "plan.json", json.loads(job.with_name("plan.json").read_text())
    cluster = plan["cluster"]
    plan["cluster"] = {**cluster, "device": {**cluster["device"], "memory_bytes": 1000}}
    small.write_text(json.dumps(plan))
    code, _, err = dry_run(job, tmp_path / "run", monkeypatch, capsys, "--plan", str(small))
    assert code == 2 and "does not fit: Out of memory on 2 of 2 ranks: rank" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"units": []}, "/plan.json: module 'image' has 2 layers; the plan's stages hold 0."),
        ({"batch_size": 5}, "/plan.json: batch_size is 5; it must be a multiple of dp * microbatch_size"),
        ({"fills": [{"rank": 0, "action": "2F0"}]}, "/plan.json: there are fills, but no unit shares the backbone's"),
    ],
)
def test_a_plan_that_cannot_be_is_one_sentence_with_its_file(refused, change, said):
    assert refused(**change).startswith(said)


def test_fills_that_cannot_run_are_one_sentence_with_the_file_and_the_field(refused):
    llm = {"name": "llm", "stages": [{"backbone": 1}, {"backbone": 2}], "pp": 2}
    encoders = [{"name": name, "stages": [{name: 2}], "dp": 2} for name in ("image", "audio")]
    said = refused(units=[llm, *encoders], fills=[{"rank": 0, "action": "2F0"}])
    assert said == (
        "/plan.json: 'fills': no fill says where the forward passes of stage 3 run; every pass needs a place."
    )


def test_a_dry_run_refuses_what_does_not_agree(refused):
    assert "is for run.batch_size = 6, and the recipe has 12" in refused("run.batch_size=12", options=["--dry-run"])
    said = refused("model.backbone.config.num_hidden_layers=4", options=["--dry-run"])
    assert "has blocks image 2, audio 2, backbone 3, the recipe's has" in said


def test_the_recipe_may_name_the_plan(job, tmp_path, monkeypatch, capsys):
    sets = [word for one in (*AS_PLANNED, "run.plan=plan.json") for word in ("--set", one)]
    monkeypatch.setattr(sys, "argv", ["motet", "train", str(job), "--set", f"run.dir={tmp_path / 'run'}", *sets])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2 and f"{job.with_name('plan.json')} is for 2 ranks" in capsys.readouterr().err


def test_a_recipe_with_a_plan_is_not_shown_as_if_it_had_none(job, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["motet", "simulate", str(job), "--set", "run.plan=plan.json"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "trains under a plan, run.plan: `motet simulate " in capsys.readouterr().err


@pytest.mark.parametrize(("command", "more"), [("train", ["--dry-run"]), ("simulate", [])])
def test_a_recipe_that_states_degrees_is_not_shown_as_if_it_had_none(job, monkeypatch, capsys, command, more):
    monkeypatch.setattr(sys, "argv", ["motet", command, str(job), "--set", "parallel.image.pp=1", *more])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "states [parallel], so it trains under a plan: `motet plan " in capsys.readouterr().err


def test_degrees_that_no_plan_has_end_training_with_a_sentence(job, tmp_path, monkeypatch, capsys):
    sets = [word for one in (*AS_PLANNED, "parallel.image.dp=2") for word in ("--set", one)]
    monkeypatch.setattr(sys, "argv", ["motet", "train", str(job), "--set", f"run.dir={tmp_path / 'run'}", *sets])
    with pytest.raises(SystemExit) as exit_:
        main()
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit_.value.code == 2 and said == "image is pinned to dp = 2, 2 ranks, and the cluster has 1."


def test_planning_marks_or_leaves_out_what_cannot_be_trained(job, tmp_path, monkeypatch, capsys):
    """--trainable writes a plan that training runs; without it, what it cannot run is said."""
    out = tmp_path / "plan.json"
    given = ["motet", "plan", str(job), "--ranks-per-node", "2", "--no-what-if", "--out", str(out)]
    for more in (
        ["--pin", "schedule=zb_h1", "--set", "run.compile=true"],
        ["--pin", "pp=2", "--pin", "tp=1", "--trainable"],
    ):
        monkeypatch.setattr(sys, "argv", [*given, *more])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code
        said = " ".join(capsys.readouterr().out.split())
        if "--trainable" in more:
            assert "training cannot run" not in said and "only predicted" not in said
            assert "ZB-H1" in said and "bubble filling" in said, "what training runs is proposed"
            assert f"torchrun --standalone --nproc-per-node 2 -m motet train {job} --plan {out}" in said
            assert "plan.sbatch" not in said
        else:
            assert "Training cannot run all plans yet, so these are only predicted:" in said


@pytest.mark.parametrize(
    ("launcher", "start"), [("slurm", "sbatch {}.sbatch"), ("k8s", "kubectl apply -f {}.k8s.yaml")]
)
def test_planning_writes_the_file_of_the_job(job, tmp_path, monkeypatch, capsys, launcher, start):
    out = tmp_path / "plan.json"
    quick = ["--pin", "strategy=chain", "--pin", "pp=2", "--pin", "schedule=1f1b", "--no-what-if"]
    more = ["--out", str(out), "--launch", launcher, "--set", "run.steps=4"]
    given = ["motet", "plan", str(job), "--ranks-per-node", "2", *quick, *more]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    command = start.format(out.with_suffix(""))
    assert f"Start the job: {command}" in capsys.readouterr().out
    text = (tmp_path / command.rpartition("/")[2]).read_text()
    assert f"-m motet train {job} --set run.steps=4 --plan {out}" in text and "--nproc-per-node 2" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--launch", "pbs"], "--launch pbs: must be slurm or k8s."),
        (["--launch", "slurm", "--measure", "1"], "--launch writes a job for another place"),
    ],
)
def test_a_job_that_cannot_be_written_is_one_sentence(job, monkeypatch, capsys, options, said):
    monkeypatch.setattr(sys, "argv", ["motet", "plan", str(job), *options])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2 and said in capsys.readouterr().err
