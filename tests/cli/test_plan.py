"""`motet plan`: from a recipe to a Plan that `motet simulate` reads; what is wrong is one sentence and exit code 2."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

from cli.on_ranks import motet_on_ranks
from cli.tiny_job import write_tiny_job
from motet.analyze.lengths import read_lengths
from motet.cli import main
from motet.core.errors import UserError
from motet.planner import what_if
from motet.planner.strategies import STRATEGIES
from motet.planning import measure
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.under_plan import recipe_under_plan
from motet.train.recipe.recipe_file import load_recipe
from ranks import TIMEOUT_S

RECIPE = """
[run]
batch_size = 32

[cluster]
device = "h100"
ranks_per_node = 2

[model.backbone]
num_layers = 4
hidden = 256
mlp = 1024
num_heads = 4
vocab_size = 1000

[model.encoders.image]
kind = "vit"
num_layers = 2
hidden = 128
mlp = 512
num_heads = 4
projector = { downsample = 4 }

[[workload.task]]
name = "images"
text = { median = 100, spread = 0.5, max = 1000 }
[workload.task.items.image]
length = { median = 200, spread = 0.5 }
length_per_token = 4
"""


TRAINS = ("--set", "run.dir=run", "--set", "run.steps=2")
SMALL = ("--set", "run.batch_size=8")
QUICK = ("--pin", "strategy=data-parallel", "--no-what-if")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(RECIPE)
    return path


def motet(monkeypatch, *words) -> None:
    monkeypatch.setattr(sys, "argv", ["motet", *map(str, words)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code in (0, None)


def fails(monkeypatch, capsys, *words) -> str:
    error = fails_at_last(monkeypatch, capsys, *words)
    assert error.count("\n") == 0
    return error


def fails_at_last(monkeypatch, capsys, *words) -> str:
    """What is said on standard error, a progress bar included."""
    monkeypatch.setattr(sys, "argv", ["motet", *map(str, words)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The folder of a job that was planned in full on two ranks, with all that it writes, and what it printed."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "job.toml").write_text(RECIPE)
    writes = "--explain", "all.html", "--html", "step.html", "--json", "figures.json"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "400")
        # What hides messages is trained, too.
        motet(patch, "plan", "job.toml", *SMALL, "--set", "cluster.tensor_pieces=2", "--no-what-if", *writes)
    return folder, printed.getvalue()


def explained(page: str, shown: str) -> bool:
    """Whether the explanation has all that the terminal has."""
    told = [line.strip() for line in shown.splitlines() if line.strip() and not line.startswith("Wrote")]
    return all(part in html.unescape(page) for line in told for part in re.split(r" {2,}", line))


def test_the_plan_is_written_and_simulates_to_the_step_that_was_shown(planned, monkeypatch, capsys):
    folder, shown = planned
    assert "Wrote plan.json, plan.png, step.html, all.html, figures.json." in shown
    page = (folder / "all.html").read_text()
    ranked = [line for line in shown.splitlines() if re.search(r"%  +\d+$", line)]
    assert page.count("<section") == page.count("<iframe") == page.count('<tr><td><a href="#plan-') == len(ranked) > 1
    for written in ("plan.png", "step.html", "all.html"):
        assert (folder / written).stat().st_size > 1000
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "400")
    motet(monkeypatch, "simulate", "plan.json", "--workload", "job.toml")
    simulated = capsys.readouterr().out
    step = next(line for line in simulated.splitlines() if line.startswith("step")).split()[1:3]
    winner = next(line for line in shown.splitlines() if line.startswith(("data parallel", "chain", "modality")))
    assert " ".join(step) in winner
    assert explained(page, shown)
    assert "memory by rank" in html.unescape(page) and (folder / "all.html").stat().st_size < 2_000_000


FIGURES = {"strategy", "trainable", "why_not", "step_s", "bound_s", "peak_bytes", "bubbles_s", "mfu", "hfu"}


def test_figures_as_json(planned, recipe, tmp_path, monkeypatch, capsys):
    """A list, best first; alone on standard output where that is asked for."""
    folder, _ = planned
    written = json.loads((folder / "figures.json").read_text())
    launched = "--launch", "slurm", "--no-what-if", "--pin", "strategy=chain", "--pin", "schedule=1f1b"
    motet(monkeypatch, "plan", recipe, "--json", "-", *launched, *SMALL, *TRAINS)
    printed = json.loads(capsys.readouterr().out)
    assert (tmp_path / "plan.json").exists() and (tmp_path / "plan.sbatch").exists()
    for tables in (written, printed):
        assert all(table.keys() >= FIGURES and "tokens_per_s" in table for table in tables)
        assert [table["step_s"] for table in tables] == sorted(table["step_s"] for table in tables)
        assert all(table["trainable"] == (table["why_not"] == "") for table in tables)
        assert all(len(table["peak_bytes"]) == len(table["ranks"]) for table in tables)
    assert "data parallel" in {table["strategy"] for table in written}
    assert all(table["trainable"] for table in printed)
    assert not any("tensor_pieces" in table["why_not"] for table in written)
    divided = "--pin", "strategy=data-parallel", "--pin", "tp=2", "--no-what-if", *SMALL
    motet(monkeypatch, "plan", recipe, "--json", "-", "--out", "divided.json", *divided)
    assert all(table["trainable"] for table in json.loads(capsys.readouterr().out))
    motet(monkeypatch, "simulate", folder / "plan.json", "--workload", folder / "job.toml", "--json", "-")
    simulated = json.loads(capsys.readouterr().out)
    assert simulated.keys() >= FIGURES
    assert [simulated[key] for key in ("strategy", "step_s", "trainable")] == [
        written[0][key] for key in ("strategy", "step_s", "trainable")
    ]


def test_numbers_of_another_device_are_named(recipe, monkeypatch, capsys):
    """They were dropped without a word; those of the command line are of the device that it names."""
    run = "simulate", recipe, "--json", "-", *TRAINS
    many = ("--set", "cluster.memory_gbytes=60", "--set", "cluster.nodes=2")
    motet(monkeypatch, *run, "--cluster", "a40", *many)
    shown = capsys.readouterr()
    told = "ranks_per_node in [cluster] is of its device, h100, so it is not taken for --cluster a40; what --set says"
    assert told in shown.err and shown.err.count("\n") == 1
    assert json.loads(shown.out)["capacity_bytes"] == 60e9
    for same in (("--cluster", "H100"), ("--cluster", "a40", "--ranks-per-node", "4"), ()):
        motet(monkeypatch, *run, *same)
        assert not capsys.readouterr().err
    motet(monkeypatch, *run, "--cluster", "a40", "--set", 'cluster={ device = "h100", memory_gbytes = 60 }')
    assert "memory_gbytes in [cluster] is of its device, h100, so it is not taken" in capsys.readouterr().err
    peaks = ("--set", "cluster.peak_tflops={ fp16 = 500 }")
    motet(monkeypatch, *run, *peaks)
    told = "peak_tflops in [cluster] is of fp16, and the job computes in bf16, so it has no effect"
    assert told in capsys.readouterr().err
    motet(monkeypatch, *run, *peaks, "--set", "cluster.peak_tflops.bf16=500")
    assert not capsys.readouterr().err


def test_pieces_that_are_copied(recipe, monkeypatch, capsys):
    """They are priced as any pieces; without pieces nothing is copied."""
    copied, pieces = (("--set", f"cluster.{one}") for one in ("tensor_transport=copy_engines", "tensor_pieces=2"))
    told = fails(monkeypatch, capsys, "plan", recipe, *QUICK, *copied)
    assert "tensor_transport is 'copy_engines', by which pieces of products travel, and tensor_pieces is 1" in told
    told = fails(monkeypatch, capsys, "plan", recipe, *QUICK, "--set", "cluster.tensor_transport=engines", *pieces)
    assert "cluster.tensor_transport" in told and "'collectives' or 'copy_engines'" in told
    steps = []
    for options in (pieces, (*pieces, *copied)):
        motet(monkeypatch, "plan", recipe, *QUICK, *TRAINS, "--pin", "tp=2", *options, "--json", "-")
        steps.append(json.loads(capsys.readouterr().out)[0]["step_s"])
    assert steps[0] == steps[1]
    written = json.loads((recipe.parent / "plan.json").read_text())["cluster"]
    assert (written["tensor_pieces"], written["tensor_transport"]) == (2, "copy_engines")


@pytest.mark.slow
def test_a_cluster_without_a_device_is_of_the_one_that_the_command_line_names(recipe, monkeypatch, capsys):
    recipe.write_text(RECIPE.replace('device = "h100"\nranks_per_node = 2', ""))
    pieces = ("--set", "cluster.tensor_pieces=2")
    motet(monkeypatch, "plan", recipe, "--cluster", "h100", *QUICK, *TRAINS, *pieces)
    shown = capsys.readouterr()
    assert (
        not shown.err.strip() and "cluster.tensor_pieces=2 --set cluster.device=h100" in shown.out
    )  # Of the line that trains.
    assert json.loads((recipe.parent / "plan.json").read_text())["cluster"]["tensor_pieces"] == 2
    told = fails(monkeypatch, capsys, "plan", recipe, "--cluster", "h1000", *pieces)
    assert "--cluster h1000: there is no device 'h1000' in the catalogue" in told
    assert "cluster.device" in fails(monkeypatch, capsys, "plan", recipe, *pieces)


@pytest.mark.slow
def test_what_would_change_the_best_is_tried_where_it_is_quick_or_asked_for(recipe, monkeypatch, capsys):
    def told(*options):
        motet(monkeypatch, "plan", recipe, "--pin", "strategy=data-parallel", *options)
        shown = capsys.readouterr().out
        if "--explain" in options:
            assert explained((recipe.parent / "all.html").read_text(), shown)
        return [line for line in shown.splitlines() if "--what-if" in line or line.startswith("With ")]

    monkeypatch.setenv("COLUMNS", "400")
    quick = told("--explain", "all.html")
    assert len(quick) >= 3 and [line.split()[1] for line in quick] == ["2", *["2"] * (len(quick) - 2), "batches"]
    assert quick[0].startswith("With 2 times the memory, 160 GB a device: ")
    assert "With batches of 64 examples instead of 32: at least " in quick[-1]
    assert told("--no-what-if") == []
    monkeypatch.setattr(what_if, "MAX_EXAMPLES", 31)
    assert told() == ["--what-if tries what more memory, a node more and larger batches would change."]
    assert told("--what-if") == quick


def test_pins_are_kept(recipe, tmp_path, monkeypatch, capsys):
    pins = "--pin", "strategy=chain", "--pin", "pp=2", "--pin", "schedule=1f1b"
    motet(monkeypatch, "plan", recipe, *pins, *SMALL, "--no-what-if")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [unit["pp"] for unit in plan["units"]] == [2]
    assert plan.get("schedule", "1f1b") == "1f1b"
    assert "with strategy = chain, pp = 2, schedule = 1f1b" in " ".join(capsys.readouterr().out.split())


def test_the_command_line_names_the_cluster(recipe, tmp_path, monkeypatch):
    motet(monkeypatch, "plan", recipe, "--cluster", "A40", "--nodes", "2", *QUICK)
    cluster = json.loads((tmp_path / "plan.json").read_text())["cluster"]
    assert (cluster["device"]["name"], cluster["num_nodes"], cluster["ranks_per_node"]) == ("a40", 2, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cluster", "cpu"), "computes in bf16 (precision), of which cpu has no peak: set precision to 'fp32', name"),
        (
            ("--cluster", "cpu", "--set", "fsdp.param_dtype=bfloat16"),
            "computes in bf16 (fsdp.param_dtype), of which cpu has no peak: set fsdp.param_dtype to 'float32' or "
            "'float64', name another device (--cluster), or state it (cluster.peak_tflops).",
        ),
        (
            ("--set", "run.dtype=float64"),
            "computes in fp64 (run.dtype), of which h100 has no peak: set run.dtype to 'float32', name",
        ),
    ],
)
def test_what_the_device_has_no_peak_of_is_named_by_its_key(recipe, options, said, monkeypatch, capsys):
    assert said in fails(monkeypatch, capsys, "plan", recipe, *options)


def test_nothing_fits(recipe, monkeypatch, capsys):
    memory = "cluster.memory_gbytes=0.012"
    recipe.write_text(RECIPE.replace("ranks_per_node = 2", "ranks_per_node = 4"))
    monkeypatch.setattr(sys, "argv", ["motet", "plan", str(recipe), "--set", memory])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("Nothing fits for job in batches of 32 on 4 h100. Nearest is ")
    assert " lack" in error
    assert "; fits with " in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--what-if", "--measure", "1"], "--what-if compares predictions, and --measure runs real steps; leave one"),
        (["--pin", "tpp=2"], "--pin tpp=2: there is no 'tpp' to pin; did you mean 'tp'?"),
        (["--pin", "tp"], "--pin tp: must be written as KEY=VALUE, for example --pin tp=8."),
        (["--pin", "tp=0"], "--pin tp=0: tp must be a whole number of at least 1, and below a billion."),
        (["--pin", "tp=" + "9" * 5000], "tp must be a whole number of at least 1, and below a billion."),
        (["--pin", "recompute=some"], "--pin recompute=some: must be one of none, least, full."),
        (["--cluster", "h300"], "--cluster h300: there is no device 'h300' in the catalogue"),
        (["--workload", "no.csv"], "no.csv: there is no such file"),
        (["--workload", "."], ". is a folder; name the manifest in it, or another file of lengths."),
        (["--pin", "schedule=gpipe"], "--pin schedule=gpipe: must be one of 1f1b, interleaved_1f1b, zb_h1, zb_v, data"),
        (["--out", "none/plan.json"], "none/plan.json cannot be written: there is no folder none."),
        (["--html", "."], ". cannot be written: it is a folder; name a file."),
        (
            ["--explain", "plan.png"],
            "plan.png cannot be written: two of --out, --png, --html, --explain and --json name it.",
        ),
        (["--json", "job.toml"], "job.toml cannot be written: this command reads it; name another file."),
        (
            ["--launch", "slurm", "--out", "plan.sbatch"],
            "plan.sbatch cannot be written: another output of this command has that name; name another file.",
        ),
        (["--set", "model.backbone.mpl=3"], "unknown key 'model.backbone.mpl'; did you mean 'mlp'?"),
        (["--set", "model.encoders.image.num_mel_bins=3"], "num_mel_bins, which has no effect on an encoder of kind"),
        (["--set", "model.backbone.num_heads=3"], "3 heads do not divide a row of 256"),
    ],
)
def test_wrong_input(recipe, options, said, monkeypatch, capsys):
    assert said in fails(monkeypatch, capsys, "plan", recipe, *options)


def test_what_is_assumed_of_lengths_is_said(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    rows = ["image_width,image_height,audio_seconds,text_tokens", *["280,280,2.5,40"] * 3]
    (tmp_path / "lengths.csv").write_text("\n".join(rows))
    motet(monkeypatch, "plan", recipe, "--workload", "lengths.csv", *QUICK)
    shown = capsys.readouterr().out
    assert all(sentence in shown for sentence in read_lengths("lengths.csv").workload().assumptions)
    assert "Examples have items of audio, for which the model has no module" in shown


def test_what_is_missing(recipe, monkeypatch, capsys):
    before = RECIPE.split("[[workload.task]]", maxsplit=1)[0]
    recipe.write_text(before)
    assert "has neither [data] nor [workload]" in fails(monkeypatch, capsys, "plan", recipe)
    recipe.with_name("empty.csv").write_text("text_tokens\n0\n")
    said = fails(monkeypatch, capsys, "plan", recipe, "--workload", "empty.csv")
    assert said == "empty.csv has no tokens: the sequence of every example is empty."
    recipe.write_text(RECIPE.replace('[cluster]\ndevice = "h100"\nranks_per_node = 2\n', ""))
    assert "has no [cluster], so --cluster must name" in fails(monkeypatch, capsys, "plan", recipe)
    recipe.write_text(RECIPE)
    image = "model.encoders.image"
    frozen = ("model.backbone.train=false", f"{image}.train=false", f"{image}.projector.train=false")
    options = [word for key in frozen for word in ("--set", key)]
    assert "job.toml: Nothing learns: every weight" in fails(monkeypatch, capsys, "plan", recipe, *options)


def test_a_training_recipe(tmp_path, monkeypatch, capsys):
    """Its data are the workload, and its model HF families."""
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny_job(tmp_path)
    motet(monkeypatch, "plan", recipe, "--cluster", "a40", "--ranks-per-node", "2", "--out", "tiny.json", *QUICK)
    plan = json.loads((tmp_path / "tiny.json").read_text())
    assert plan["batch_size"] == 6
    assert plan["precision"] == "fp32"
    assert (tmp_path / "tiny.png").exists()
    said = capsys.readouterr().out
    assert "Train it: torchrun" in said and "Remove" not in said


def test_what_trains_has_ranks_that_share_sequences_as_context_says(tmp_path, monkeypatch, capsys):
    """Training refuses `[context]` where no ranks share a sequence, so a plan without such ranks does not train."""
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny_job(tmp_path)
    asks = recipe, "--cluster", "a40", "--trainable", "--no-what-if", "--pin", "strategy=chain"
    asks += "--set", "context.exchange=ulysses", "--set", "run.batch_size=2"
    error = fails_at_last(monkeypatch, capsys, "plan", *asks, "--ranks-per-node", "1")
    assert "training cannot run another cp than [context] is for (context.exchange is 'ulysses', but no ranks" in error
    motet(monkeypatch, "plan", *asks, "--ranks-per-node", "2", "--pin", "cp=2", "--pin", "dp=1", "--pin", "pp=1")
    units = json.loads((tmp_path / "plan.json").read_text())["units"]
    assert units[0]["cp"] == 2 and "Train it: torchrun" in capsys.readouterr().out


def test_a_pin_that_outweighs_the_recipe_is_in_the_command_that_trains(tmp_path, monkeypatch, capsys):
    """Training refuses a plan without the degrees that the recipe states."""
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny_job(tmp_path)
    recipe.write_text(recipe.read_text() + "[parallel.backbone]\npp = 2\n")
    asks = "--cluster", "a40", "--ranks-per-node", "2", "--launch", "slurm", "--pin", "backbone.pp=1", *QUICK
    motet(monkeypatch, "plan", recipe, *asks)
    train = shlex.split(capsys.readouterr().out.split("Train it: ")[1].splitlines()[0])
    assert train[-4:] == ["--set", "parallel.backbone.pp=1", "--plan", "plan.json"]
    assert (tmp_path / "plan.sbatch").read_text().rstrip().endswith(shlex.join(train[train.index("-m") :]))
    stated = load_recipe(recipe, [train[-3]])
    recipe_under_plan(stated, recipe, tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"backbone has pp = 1, not 2 as in \[parallel\]"):
        recipe_under_plan(load_recipe(recipe), recipe, tmp_path / "plan.json")


def test_what_the_plan_decides_is_to_leave_the_recipe_before_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny_job(tmp_path)
    recipe.write_text(recipe.read_text() + "[fsdp]\nrecompute = true\nreshard_after_forward = false\n")
    motet(monkeypatch, "plan", recipe, "--cluster", "a40", "--ranks-per-node", "2", "--trainable", *QUICK)
    *_, first, then = capsys.readouterr().out.splitlines()
    assert first == f"Remove fsdp.recompute, fsdp.reshard_after_forward from {recipe} first, as the plan decides them."
    assert then.startswith("Train it: torchrun")


PHASED = """
[[run.phase]]
name = "align"
steps = 2
learns = "projectors"

[[run.phase]]
name = "tune"
steps = 2
batch_size = 16
"""


@pytest.fixture
def phased(recipe):
    recipe.write_text(RECIPE.replace("batch_size = 32\n", f'batch_size = 32\ndir = "run"\n{PHASED}', 1))
    return recipe.name


def test_every_phase_is_planned_at_once_and_the_line_trains_all(phased, tmp_path, monkeypatch, capsys):
    few = ("--ranks-per-node", "1", *QUICK)
    motet(monkeypatch, "plan", phased, *few)
    said = capsys.readouterr().out
    plans = [json.loads((tmp_path / f"plan-{name}.json").read_text()) for name in ("align", "tune")]
    assert [plan["batch_size"] for plan in plans] == [32, 16]
    assert plans[0]["model"] != plans[1]["model"]  # The first trains projectors alone.
    assert (tmp_path / "plan-align.png").exists() and not (tmp_path / "plan.json").exists()
    line = (
        f"torchrun --standalone --nproc-per-node 1 -m motet train {phased} --plan plan-align.json --plan plan-tune.json"
    )
    assert "Phase align" in said and said.rstrip().endswith(f"Train them: {line}")
    motet(monkeypatch, "plan", phased, *few, "--set", "run.phase=tune")
    assert json.loads((tmp_path / "plan.json").read_text()) == plans[1]
    assert "give --plan 2 times" in fails(monkeypatch, capsys, "train", phased, "--plan", "plan-align.json")
    crossed = ("--plan", "plan-tune.json", "--plan", "plan-align.json")
    assert "run.batch_size = 16, and the recipe has 32" in fails(monkeypatch, capsys, "train", phased, *crossed)


@pytest.mark.parametrize("option", [("--json", "-"), ("--measure", "2"), ("--launch", "slurm")])
def test_what_is_of_one_plan_asks_for_a_phase(phased, monkeypatch, capsys, option):
    assert "choose one with --set run.phase=align" in fails(monkeypatch, capsys, "plan", phased, *option)


def test_a_model_of_hf_families_without_data(recipe, tmp_path, monkeypatch):
    """Their sizes are HF's options; the vocabulary must be among them, as no tokenizer tells it."""
    options = "{ hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, vocab_size = 100 }"
    model = f'[model.backbone]\nfamily = "llama"\nconfig = {options}\n'
    before = RECIPE.split("[model.backbone]", maxsplit=1)[0]
    task = '[[workload.task]]\nname = "text"\ntext = { value = 50 }\n'
    recipe.write_text(before + model + task)
    motet(monkeypatch, "plan", recipe, *QUICK)
    names = [module["name"] for module in json.loads((tmp_path / "plan.json").read_text())["model"]["modules"]]
    assert names == ["backbone"]


A_STEP = r"\d+\.?\d* m?s"
# What is predicted, and so what is measured, then does not depend on how fast the ranks are.
STATED = """
[cluster]
device = "cpu"
ranks_per_node = 2
peak_tflops = { fp32 = 0.01 }
memory_gbytes = 8
memory_gbytes_per_s = 10
intra_node_gbytes_per_s = 1
intra_node_latency_us = 100
"""


DRAWS = """
[model.generators.draw]
makes = "image"
family = "dit"
num_queries = 2
config = { row_dim = 16, hidden = 16, num_layers = 1, num_heads = 2 }
[transforms.draw]
patch_size = 4
merge_size = 1
channels = 1
"""


@pytest.mark.slow
def test_two_ranks_measure_the_fastest_plans(tmp_path, monkeypatch):
    """Predicted and measured stand beside each other, the fastest measured first, whichever it is; what is only
    predicted comes after, and the fastest is written."""
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny_job(tmp_path / "data")
    recipe.write_text(recipe.read_text() + STATED)
    checkpoint = tmp_path / "data/run/checkpoints/step-1"
    checkpoint.mkdir(parents=True)
    done = motet_on_ranks(2, "plan", recipe, "--measure", "2", "--out", "tiny.json", "--pin", "recompute=none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Wrote tiny.json, tiny.png.") == 1
    of_strategy = "|".join(STRATEGIES)
    rows = [line for line in done.stdout.splitlines() if re.match(rf"({of_strategy}), .*{A_STEP}", line)]
    steps = [re.findall(A_STEP, row) for row in rows]
    assert [len(found) for found in steps[:3]] == [2, 2, 1]
    seconds = [float(value) * (1 if unit == "s" else 1e-3) for _, text in steps[:2] for value, unit in [text.split()]]
    assert seconds == sorted(seconds)
    written = json.loads((tmp_path / "tiny.json").read_text())
    assert (written.get("schedule") == "data_parallel") == rows[0].startswith("data parallel")
    # Of the recipe's own run nothing is read or changed.
    assert [path.name for path in (tmp_path / "data/run").iterdir()] == ["checkpoints"] and checkpoint.exists()


def test_pipelines_are_measured_too(tmp_path, monkeypatch):
    """Also of a recipe that says for itself how it trains without a plan, and with a generator, which draws noise."""
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny_job(tmp_path / "data")
    train = recipe.parent / "train.jsonl"
    media = next(json.loads(line)["image"] for line in train.read_text().splitlines() if "image" in json.loads(line))
    asks = [{"from": "human", "value": "draw"}, {"from": "gpt", "value": "see: <image>"}]
    drawn = json.dumps({"conversations": asks, "image": media}) + "\n"
    train.write_text(train.read_text() + 40 * drawn)
    recipe.write_text(recipe.read_text() + STATED + "[fsdp]\nrecompute = true\n" + DRAWS)
    pins = "--pin", "strategy=chain", "--pin", "pp=2", "--pin", "schedule=1f1b", "--pin", "recompute=none"
    done = motet_on_ranks(2, "plan", recipe, "--measure", "1", "--out", "tiny.json", *pins)
    assert done.returncode == 0, done.stderr
    best = next(
        line for line in done.stdout.splitlines() if re.match(rf"(chain|modality|disaggregated).*{A_STEP}", line)
    )
    assert len(re.findall(A_STEP, best)) == 2 and "1F1B" in best
    units = json.loads((tmp_path / "tiny.json").read_text())["units"]
    assert sum(len(unit["stages"]) for unit in units) == 2
    assert not (tmp_path / "data/run").exists()


@pytest.mark.slow
def test_plans_that_leave_over_ranks_are_measured_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_tiny_job(tmp_path / "data")
    pins = "--pin", "strategy=chain", "--pin", "pp=2", "--pin", "schedule=1f1b", "--pin", "recompute=none"
    done = motet_on_ranks(3, "plan", recipe, "--measure", "1", "--out", "tiny.json", *pins)
    assert done.returncode == 0, done.stderr
    best = next(line for line in done.stdout.splitlines() if re.match(rf"chain.*{A_STEP}", line))
    assert len(re.findall(A_STEP, best)) == 2 and best.split()[-1] == "2"


def test_other_ranks_than_those_at_hand_are_named(tmp_path):
    recipe = write_tiny_job(tmp_path / "data")
    done = motet_on_ranks(2, "plan", recipe, "--measure", "2", "--cluster", "cpu", "--ranks-per-node", "4")
    assert done.returncode == 2 and "motet/train" not in done.stderr
    said = (
        "--measure runs on what is at hand, 2 ranks of cpu, and the job is to be planned for 4 of cpu: make --cluster"
    )
    # By each: which of them speaks under torchrun is tested in test_crash.py.
    assert done.stderr.count(said) == 2 == done.stderr.count("\n")


def test_what_cannot_be_measured(recipe, tmp_path, monkeypatch, capsys):
    bare = tmp_path / "bare.toml"
    bare.write_text(recipe.read_text().partition("[[workload")[0])
    said = fails(monkeypatch, capsys, "plan", bare, "--measure", "1")
    assert said == f"--measure runs real steps, and {bare} has neither [data] nor [workload] to train on."
    trainable = write_tiny_job(tmp_path / "data")
    said = fails(monkeypatch, capsys, "plan", trainable, "--measure", "1", "--cluster", "h100")
    assert "--measure runs on what is at hand, 1 rank of cpu, and the job is to be planned for 1 of h100" in said
    said = fails(monkeypatch, capsys, "plan", trainable, "--measure", "1", "--workload", recipe)
    assert said == "--measure runs steps of the recipe's own data, so --workload cannot say other lengths."
    monkeypatch.setattr(measure, "obstacle_in", lambda recipe: lambda plan: "what is not there yet")
    said = fails(monkeypatch, capsys, "plan", trainable, "--measure", "1")
    assert "training can run none of " in said and "because of what is not there yet" in said


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_the_plan_is_written_where_nobody_reads_what_is_printed(recipe, tmp_path, closed):
    close = "; ".join(f"os.close({descriptor})" for descriptor in closed)
    start = f"import os, sys; {close}; os.execv(sys.executable, [sys.executable, '-m', 'motet', *sys.argv[1:]])"
    command = [sys.executable, "-c", start, "plan", str(recipe), *QUICK, *SMALL, "--out", str(tmp_path / "p.json")]
    assert subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode == 0
    assert (tmp_path / "p.json").is_file()


@pytest.mark.slow
def test_the_plan_is_written_where_its_reader_has_left(recipe, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "motet", "plan", str(recipe), *QUICK, *SMALL, "--out", str(tmp_path / "p.json")]
    subprocess.run(command, stdout=writing, timeout=TIMEOUT_S, check=False)
    os.close(writing)
    assert (tmp_path / "p.json").is_file()


def test_items_that_no_projector_makes_are_said(recipe, capsys):
    recipe.write_text(RECIPE.replace("length_per_token = 4", "length_per_token = 2"))
    read_job_recipe(recipe)
    assert "length_per_token is 2, but model.encoders.image makes a row of 4" in capsys.readouterr().err
    recipe.write_text(RECIPE)
    read_job_recipe(recipe)
    assert capsys.readouterr().err == ""


def test_a_pin_of_balancing_without_replicas_is_said_to_have_no_effect(recipe, monkeypatch, capsys):
    for ranks, has_none in ((1, True), (2, False)):
        pins = "--pin", "balance=joint", "--pin", f"dp={ranks}", "--ranks-per-node", str(ranks)
        motet(monkeypatch, "plan", recipe, *pins, *QUICK)
        assert ("--pin balance=joint has no effect on this plan: it has one" in capsys.readouterr().err) == has_none
