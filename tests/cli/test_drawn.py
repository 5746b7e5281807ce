"""Recipes of shapes as a user types them: trained, profiled, planned, simulated, and what is wrong with them."""

import json
import re
import shlex
from pathlib import Path

import pytest

from cli.drawn_job import MADE, RECIPE, write_drawn_job
from cli.on_ranks import motet_on_ranks
from cli.test_profile import measure_little
from cli.tiny_job import losses, metrics
from motet.cli import main
from motet.cost.profile import read_profile
from motet.train.recipe.recipe_file import dump_recipe, load_recipe


@pytest.fixture
def job(tmp_path):
    return write_drawn_job(tmp_path / "job")


@pytest.fixture
def motet(monkeypatch, capsys):
    """Runs a command: (exit code, stdout, stderr)."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["motet", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.slow
def test_two_ranks_train_with_all_that_a_run_leaves(job, tmp_path):
    sets = [f"run.dir={tmp_path / 'run'}", "run.steps=5", "run.batch_size=6", "model.backbone.num_layers=1"]
    done = motet_on_ranks(2, "train", job, "--trace", *(part for each in sets for part in ("--set", each)))
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 5
    last = metrics(tmp_path / "run")[-1]
    assert set(last["phases"]) == {"backbone", "image", "audio"} and last["num_examples"] == 6
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left >= {"recipe.toml", "summary.json", "report.html", "checkpoints", "timeline.json"}


@pytest.mark.slow
def test_a_profile_has_the_layers_of_the_shapes(motet, job, tmp_path, monkeypatch):
    measure_little(monkeypatch)
    job.write_text(RECIPE + MADE)
    out = tmp_path / "profile.json"
    sets = ("--set", f"run.dir={tmp_path}", "--set", "run.steps=1", "--set", "precision=fp32")
    code, _, err = motet("profile", job, "--out", out, "--seconds", "1", *sets)
    assert (code, err) == (0, ""), err
    measured = read_profile(out)
    assert measured.precision == "float32"
    assert {module.name: {layer.kind for layer in module.layers} for module in measured.modules} == {
        "image": {"patches", "attention", "norm", "projector"},
        "audio": {"convolution", "strided_convolution", "attention", "norm", "projector"},
        "backbone": {"embedding", "queries", "attention", "norm", "head"},
        "picture": {"projector", "patches", "attention", "norm", "output"},
    }


def test_a_dry_run_says_what_training_does(motet, job, tmp_path):
    code, said, err = motet("train", job, "--dry-run", "--json", "-")
    assert (code, err) == (0, "")
    sharded = json.loads(said)
    assert sharded["trainable"] and sharded["ranks"] == [0, 1] and len(sharded["peak_bytes"]) == 2
    assert sharded["bound_s"] < sharded["step_s"] and sharded["capacity_bytes"] > max(sharded["peak_bytes"])
    out = tmp_path / "whole.json"
    code, said, err = motet("train", job, "--dry-run", "--json", out, "--set", "fsdp.shard_size=1")
    assert (
        (code, err) == (0, "") and "Memory by rank" in said and "Each rank holds a whole copy" in " ".join(said.split())
    )
    assert json.loads(out.read_text())["memory_bytes"]["parameters"] > sharded["memory_bytes"]["parameters"]


def test_a_dry_run_that_does_not_fit_is_json_too(motet, job):
    code, said, err = motet(
        "train", job, "--dry-run", "--json", "-", "--set", "cluster.memory_gbytes=0.001", "--set", "run.batch_size=4096"
    )
    found = json.loads(said)
    assert code == 2 and not found["trainable"] and found["why_not"] in err


def test_it_is_planned_and_simulated_as_it_trains(motet, job, tmp_path):
    how = ("--set", "fsdp.recompute=true", "--set", "data.max_sequence_length=50")
    quick = "--pin", "strategy=data-parallel", "--no-what-if"
    code, _, err = motet("plan", job, "--out", tmp_path / "plan.json", *quick, *how)
    assert code == 0 and err.count("Left out: ") == 2, err
    code, said, err = motet("simulate", job, *how)
    assert code == 0 and "step" in said, err


def scaled_down(folder):
    """`recipes/mllm_72b.toml` with lengths of a 64th."""
    text = (Path(__file__).parents[2] / "recipes" / "mllm_72b.toml").read_text()
    folder.mkdir()
    recipe = folder / "mllm_72b.toml"
    recipe.write_text(re.sub(r"value = (\d{3,})", lambda found: f"value = {int(found[1]) // 64}", text))
    return recipe


FEW = {"num_layers": 2, "hidden": 16, "mlp": 32, "num_heads": 2}
LITTLE = (
    "run.batch_size=4",
    "run.steps=2",
    "precision=fp32",
    *(f"model.backbone.{key}={2 * size}" for key, size in (FEW | {"num_kv_heads": 1, "vocab_size": 32}).items()),
    *(f"model.{part}.{key}={size}" for part in ("encoders.image", "generators.generated") for key, size in FEW.items()),
)


@pytest.mark.slow
def test_mllm_72b_scaled_down_trains_as_planned(motet, tmp_path):
    """By the command that `motet plan` prints."""
    recipe, plan = scaled_down(tmp_path / "job"), tmp_path / "plan.json"
    cluster = 'cluster={ device = "cpu", ranks_per_node = 3, memory_gbytes = 8 }'
    sets = [part for each in (*LITTLE, f"run.dir={tmp_path / 'run'}", cluster) for part in ("--set", each)]
    pins = ("--trainable", "--no-what-if", "--pin", "strategy=disaggregated")
    code, said, err = motet("plan", recipe, *sets, *pins, "--out", plan)
    assert code == 0, err
    units = json.loads(plan.read_text())["units"]
    assert [unit["stages"] for unit in units if unit["name"] == "generated"] == [[{"generated": 2}]]
    command = shlex.split(said.partition("-m motet ")[2].split("\n")[0])
    assert command[0] == "train" and command[-2:] == ["--plan", str(plan)]
    done = motet_on_ranks(3, *command)
    assert done.returncode == 0, done.stderr
    assert all(step["losses"].keys() == {"backbone", "generated"} for step in metrics(tmp_path / "run"))
    assert len(losses(tmp_path / "run")) == 2


START = ("--set", "run.dir=run", "--set", "run.steps=2")
CHAIN = ("--pin", "strategy=chain", "--pin", "pp=2", "--pin", "schedule=1f1b")


def test_a_plan_with_stages_is_found_and_can_be_trained(motet, job, tmp_path):
    """As `motet plan` says it, down to the bytes of each rank."""
    out = tmp_path / "plan.json"
    code, said, err = motet("plan", job, "--trainable", "--no-what-if", *CHAIN, "--out", out, *START)
    assert code == 0, err
    line = " ".join(said.split())
    assert f"-m motet train {job} --set run.dir=run --set run.steps=2 --plan {out}" in line
    code, said, err = motet("train", job, "--dry-run", "--plan", out, "--json", "-", *START)
    assert (code, err) == (0, "") and len(json.loads(said)["peak_bytes"]) == 2
    code, _, err = motet("train", job, "--plan", out, *START)
    assert code == 2 and "plan.json is for 2 ranks, and 1 run" in err


def test_a_plan_to_train_by_needs_a_run(motet, job, tmp_path):
    code, _, err = motet("plan", job, "--trainable", "--out", tmp_path / "plan.json")
    assert code == 2 and "does not say run.dir and run.steps, which training needs: give --set run.dir=..." in err


@pytest.mark.slow
def test_a_generator_that_is_given_turns_trains_alike_under_a_plan(motet, job, tmp_path):
    job.write_text(with_turns(("text = { value = 6 }", "text = { value = 6 }\nanswer = 0.5")))
    sets = [
        "run.steps=3",
        "precision=fp32",
        "run.report_to=[]",
        'cluster={ device = "cpu", ranks_per_node = 2, memory_gbytes = 8 }',
    ]
    sets = [part for each in sets for part in ("--set", each)]
    alone, planned = (("--set", f"run.dir={tmp_path / name}") for name in ("alone", "planned"))
    assert motet("train", job, *sets, *alone)[0] == 0
    out = tmp_path / "plan.json"
    code, _, err = motet("plan", job, "--trainable", "--no-what-if", *CHAIN, "--out", out, *sets, *planned)
    assert code == 0, err
    done = motet_on_ranks(2, "train", job, *sets, *planned, "--plan", out)
    assert done.returncode == 0, done.stderr
    steps = zip(metrics(tmp_path / "alone"), metrics(tmp_path / "planned"), strict=True)
    assert all(one["losses"] == pytest.approx(two["losses"], rel=1e-5) for one, two in steps)


@pytest.mark.slow
def test_plans_with_stages_are_measured(job, tmp_path):
    job.write_text(RECIPE + MADE)
    cluster = ("--set", 'cluster={ device = "cpu", ranks_per_node = 2, memory_gbytes = 8 }', "--set", "precision=fp32")
    out = tmp_path / "plan.json"
    done = motet_on_ranks(2, "plan", job, "--measure", "1", *CHAIN, *cluster, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "Measured, the fullest rank held" in done.stdout, done.stdout
    units = json.loads(out.read_text())["units"]
    assert sum(len(unit["stages"]) for unit in units) == 2


def test_the_recipe_of_a_run_is_the_same_recipe(job, tmp_path):
    recipe = load_recipe(job, ["run.dir=run", "run.steps=2", "balance.method=joint", "data.seed=3"])
    assert (recipe.optimizer.lr, recipe.fsdp.param_dtype, recipe.run.dtype) == (1e-4, "bfloat16", "float32")
    written = tmp_path / "written.toml"
    written.write_text(dump_recipe(recipe))
    assert load_recipe(written) == recipe


@pytest.mark.parametrize(
    ("overrides", "param_dtype"),
    [(["run.dtype=float64"], None), (["fsdp.param_dtype=float32"], "float32"), (["precision=fp32"], "float32")],
)
def test_a_type_that_is_stated_is_kept(job, overrides, param_dtype):
    recipe = load_recipe(job, ["run.dir=run", "run.steps=2", *overrides])
    assert recipe.fsdp.param_dtype == param_dtype


TRAINED = ("run.dir=run", "run.steps=2")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("run.dir=run",), "does not say run.steps, which training needs: give --set run.steps=...."),
        ((), "does not say run.dir and run.steps, which training needs: give --set run.dir=... --set run.steps=...."),
        ((*TRAINED, "model.backbone.family=qwen2"), "for a model of shapes alone; a model of HF families reads files"),
        ((*TRAINED, 'data.train=["a.jsonl"]'), "so data.train has no place beside it"),
        ((*TRAINED, "evaluate.every_steps=2"), "[evaluate] has no effect beside [workload]"),
        ((*TRAINED, "export.at_end=true"), "[export] has no effect beside [workload]"),
        ((*TRAINED, "precision=bf16", "run.dtype=float64"), "precision is 'bf16', but modules compute in float64"),
        ((*TRAINED, "precision=fp8"), "'precision' must be 'bf16', 'fp16' or 'fp32', not 'fp8'"),
        (
            (*TRAINED, "model.encoders.image.projector.downsample=4"),
            "length_per_token is 2, but model.encoders.image makes a row of 4",
        ),
        ((*TRAINED, "model.backbone.num_norms=3"), "model.backbone.num_norms is 3"),
        ((*TRAINED, "model.encoders.audio.num_positions=20"), "longer than the 40 that num_positions has room for"),
        ((*TRAINED, "data.max_sequence_length=1"), "data.max_sequence_length = 1 leaves no example"),
        ((*TRAINED, "data.tokenizr=x"), "unknown key 'data.tokenizr'"),
    ],
)
def test_what_is_wrong_is_one_sentence(motet, job, tmp_path, monkeypatch, overrides, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = motet("train", job, *(part for each in overrides for part in ("--set", each)))
    assert code == 2 and said in err and err.count("\n") <= 1, err


def with_picture(*changes):
    """The recipe with a generator; changes: (what it says, what it is to say)."""
    recipe = RECIPE + MADE
    for old, new in changes:
        assert old in recipe
        recipe = recipe.replace(old, new)
    return recipe


def with_turns(*changes):
    """As `with_picture`, of a generator that is given turns."""
    recipe = with_picture(("num_queries = 2", 'condition = "turn"\nmax_turn = 15'), ("num_tokens = 2", "turn = true"))
    for old, new in changes:
        assert old in recipe
        recipe = recipe.replace(old, new)
    return recipe


def with_generator(more):
    return with_picture(("num_queries = 2", f"num_queries = 2\n{more}"))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            RECIPE + "[workload.task.items.made]\nlength = { value = 4 }\n",
            "workload.task.2.items.made has no effect on training, as there is no model.encoders.made",
        ),
        (
            with_picture(("num_queries = 2", "num_queries = 3")),
            "items.picture.num_tokens has an item take 2 rows of the sequence, but model.generators.picture."
            "num_queries is 3; give num_tokens = 3 in its place",
        ),
        (
            with_picture(("num_tokens = 2", "length_per_token = 6")),
            "items.picture.length_per_token has an item take 1 to 5 rows of the sequence",
        ),
        (with_picture(("num_tokens = 2", "num_tokens = 2\nsegment = 3")), "items.picture.segment has no effect"),
        (
            with_picture(("length = { value = 8 }\nlength_per_token = 2", "length = { value = 8 }\nnum_tokens = 4")),
            "items.image.num_tokens is for items of generators",
        ),
        (with_picture(("num_tokens = 2", "num_tokens = 2\nlength_per_token = 2")), "num_tokens and length_per_token"),
        (with_generator("num_positions = 20"), "than the 20 that num_positions has room for"),
        (
            with_picture(("num_tokens = 2", "turn = true")),
            "picture.turn is true, but model.generators.picture is given qu",
        ),
        (
            with_turns(),
            "picture.turn: of the text of the task 0 to 0 tokens stand before the answer, but model.generat",
        ),
        (
            with_turns(("answer = 0.5", "answer = 0.2")),
            "picture.turn: of the text of the task 2 to 24 tokens stand befo",
        ),
        (
            with_turns(("turn = true", "num_tokens = 2")),
            "picture.turn is false, but model.generators.picture is given a",
        ),
        (with_turns(("turn = true", "turn = true\nnum_tokens = 2")), "has turn and num_tokens, which both say what"),
        (with_picture(("length_per_token = 2", "turn = true")), "items.image.turn is for items of generators"),
        (with_generator("max_turn = 4"), '`condition` = "queries" excludes `max_turn`'),
        (with_picture(("num_queries = 2", 'condition = "turn"')), '`condition` = "turn" needs `max_turn`'),
        (with_generator('condition = "turn"\nmax_turn = 4'), '`condition` = "turn" excludes `num_queries`'),
        (with_generator("projector = { downsample = 2 }"), "model.generators.picture.projector.downsample"),
        (with_generator("num_experts = 2\nexperts_per_token = 1"), "no mixture of experts yet"),
        (with_picture(('picture]\nkind = "vit"', 'picture]\nkind = "audio"')), "must be 'vit'"),
    ],
)
def test_items_and_generators_that_nothing_computes_are_refused(motet, job, recipe, said):
    job.write_text(recipe)
    code, _, err = motet("train", job, "--dry-run")
    assert code == 2 and said in err and err.count("\n") <= 1, err


def test_json_is_for_a_dry_run(motet, job, tmp_path):
    sets = [part for each in TRAINED for part in ("--set", each)]
    code, _, err = motet("train", job, "--json", tmp_path / "a.json", *sets)
    assert code == 2 and "--json is for --dry-run" in err
    code, _, err = motet("train", job, "--dry-run", "--json", tmp_path / "absent" / "a.json")
    assert code == 2 and "there is no folder" in err
