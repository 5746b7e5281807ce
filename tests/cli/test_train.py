"""`motet train` as a user starts it: alone, under torchrun, and killed in mid-step."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import benchmark
from cli.meddling import PROGRAM, Meddling, motet
from cli.on_ranks import motet_under_agent
from cli.test_stop import STEP, TIMEOUT_S, arguments, torchrun
from cli.tiny_job import losses, metrics
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import free_port, run_ranks

with benchmark("whole_models") as whole_models:
    pass


def killed(*, step):
    """The second rank, as it begins a step (from 1) of its first attempt."""
    return Meddling("motet.runtime.step:TrainStep.run", step, 1, "stop(signal.SIGKILL, os.getpid())")


def test_the_last_line_of_a_whole_model_says_how_it_is_exported(tmp_path):
    whole_models.write_job(tmp_path, "llava", 2)
    few = ["run.steps=1", "run.batch_size=2", "data.num_workers=0", "run.report_to=[]", f"run.dir={tmp_path / 'run'}"]
    done = motet("train", str(tmp_path / "recipe.toml"), *(word for each in few for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    said, *command = done.stdout.splitlines()[-1].partition("motet ")
    assert said == "For transformers: "
    words = shlex.split(command[1].replace("DIR", str(tmp_path / "out")))
    assert motet(*words).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_run_alone_learns_and_leaves_everything(job, tmp_path):
    done = motet(*arguments(job, tmp_path, "run.steps=60", "export.at_end=true"), "--trace")
    assert done.returncode == 0, done.stderr
    loss = losses(tmp_path)
    assert len(loss) == 60
    assert sum(loss[-10:]) < 0.6 * sum(loss[:10])

    last = metrics(tmp_path)[-1]
    assert last["position"] == 360
    assert last["tokens_per_s_per_rank"] == last["tokens_per_s"] > 0
    assert 0 < last["mfu"] < 1
    assert last["memory"]["kind"] == "resident"
    assert set(last["phases"]) == {"backbone", "image", "audio"}
    assert {phase["unit"] for phase in last["phases"].values()} == {"FLOP"}
    assert last["actions"]["forward backbone"]["max_s"] > 0
    assert {"backward image", "backward audio", "norm", "optimizer"} <= set().union(
        *(m["actions"] for m in metrics(tmp_path))
    )
    assert sum(last["balance"]["methods"].values()) == 1
    assert set(last["balance"]["predicted_s"]) >= {"joint", "per_phase", "unbalanced"}
    for key in (
        "grad_norm",
        "lr",
        "data_wait_s",
        "decide_s",
        "core_wait_s",
        "exchange",
        "bad_examples",
        "num_targets",
        "step_s",
    ):
        assert key in last

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["loss_last"] < summary["loss_first"]
    assert set(summary["exact_match"]) == {"text", "image", "audio", "both"}
    assert summary["phases"]["image"]["max_over_bound"] == 1
    assert summary["balance"]["methods"] == {"joint": 60}, "alone, there is nothing to choose"
    assert "balanced by joint 60 of 60 microbatches" in done.stdout
    assert re.search(r"step 60/60  \d\.\d{4} held out, \w+: [\d.]+% exact", done.stdout)
    assert f"Trained model: {tmp_path / 'export'}" in done.stdout
    assert "max/bound load" not in done.stdout, "alone, there is nothing to balance"
    spans = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    kinds = {(span["cat"], span["args"]["module"]) for span in spans}
    assert kinds >= {("F", "image"), ("B", "backbone"), ("STEP", "")}
    assert "Step 60, measured" in (tmp_path / "timeline.html").read_text()
    assert list((tmp_path / "tensorboard").iterdir())
    assert (tmp_path / "recipe.toml").exists()
    assert (tmp_path / "export/backbone/model.safetensors").exists()

    report = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in report
    assert "data:audio" in report
    assert not re.search(r"(src|href)=\"http", report)


def test_what_a_run_does_between_steps_is_no_wait_for_data(job, tmp_path):
    """A checkpoint takes an hour, by the clock that is read."""
    hour = "import time; own = time.perf_counter; time.perf_counter = lambda: own() + 3600"
    slow_disk = Meddling("motet.train.checkpoint.saving:Checkpointer.save", 1, 0, hour)
    short = ("run.steps=2", "checkpoint.every_steps=1", "data.heldout=[]")
    assert motet(*arguments(job, tmp_path, *short), meddling=slow_disk).returncode == 0
    last = metrics(tmp_path)[-1]
    assert last["step_s"] > 3600 > last["data_wait_s"]


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks_under_torchrun_say_what_is_wrong_once(job, tmp_path):
    done = torchrun(job, tmp_path, 'data.train=["absent.jsonl"]')
    assert done.returncode != 0
    assert done.stderr.count("absent.jsonl") == 1
    assert "exitcode  : 2" in done.stderr
    # torchrun itself ends with a traceback of its own; ours would name our files.
    assert "motet/train" not in done.stderr


def train_rank(rank, num_ranks, recipe, overrides):
    train(load_recipe(Path(recipe), overrides))


@pytest.mark.slow
def test_killed_in_mid_step_and_restarted_by_torchrun(job, tmp_path):
    overrides = ("run.steps=12", "checkpoint.every_steps=3", "checkpoint.keep=9", "data.heldout=[]")
    run_ranks(train_rank, 2, str(job), [f"run.dir={tmp_path / 'whole'}", *overrides])
    first, asked = 3, tmp_path / "whole" / "checkpoints" / "step-00000003"
    # The first checkpoint is written in the background, and complete before the second is begun.
    line = arguments(job, tmp_path / "killed", *overrides)
    done = motet_under_agent(2, *line, "--resume", asked, meddling=killed(step=8), max_restarts=2)
    assert done.returncode == 0, done.stderr
    resumed = re.findall(r"Resuming after step (\d+) from (\S+)/checkpoints/", done.stdout)
    assert int(resumed[-1][0]) in (first + 3, first + 6)
    assert resumed[-1][1] == str(tmp_path / "killed"), "its own, and not PATH again"
    assert [step["loss"] for step in metrics(tmp_path / "killed")] == losses(tmp_path / "whole")[first:]


@pytest.mark.slow
@pytest.mark.torchrun
def test_killed_on_one_of_two_machines_and_restarted_on_both(job, tmp_path):
    """torchrun counts a restart where the rank has died; where ranks do not fail by then, it counts none."""
    dies = "import time; os.environ['RANK'] == '1' and stop(signal.SIGKILL, os.getpid()); time.sleep(4)"
    meddling = Meddling(STEP, 6, -1, dies)
    overrides = ("run.steps=8", "checkpoint.every_steps=2", "data.heldout=[]", "run.wait_limit_s=60")
    port, command = free_port(), arguments(job, tmp_path, *overrides)
    meets = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job", "--local-addr=localhost")
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    machines = [
        subprocess.Popen(
            [*agent, *meets, PROGRAM, *meddling.arguments(), *command, "--resume", "never"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [machine.communicate(timeout=TIMEOUT_S)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert re.search(r"Resuming after step [24] from", "".join(said)), "what the first attempt saved is not removed"
    assert len(losses(tmp_path)) == 8


@pytest.mark.slow
def test_killed_in_the_second_phase_and_restarted_by_torchrun(job, tmp_path):
    phases = [f'[[run.phase]]\nname = "{name}"\nsteps = {steps}\n' for name, steps in (("align", 2), ("tune", 9))]
    phased = job.with_name("phased.toml")
    phased.write_text(
        job.read_text().replace("steps = 8\n", "").replace("[data]\n", "\n".join([*phases, "[data]\n"]), 1)
    )
    overrides = ("checkpoint.every_steps=2", "data.heldout=[]")
    # The sixth of the second phase: by then its first checkpoint is written, as the second began to be.
    line = arguments(phased, tmp_path, *overrides)
    done = motet_under_agent(2, *line, meddling=killed(step=8), max_restarts=1)
    assert done.returncode == 0, done.stderr
    said = [
        line.rpartition(" from ")[0] or line for line in done.stdout.splitlines() if re.match("Phase|Resuming", line)
    ]
    assert said[:2] == [
        f"Phase {name}, in {tmp_path}/{folder}."
        for name, folder in (("align (1 of 2): 2 steps", "align"), ("tune (2 of 2): 9 steps", "tune"))
    ]
    assert said[2:4] == ["Phase align (1 of 2) has ended, with step 2.", said[1]]
    assert said[4] in ("Resuming after step 2", "Resuming after step 4")
    assert len(losses(tmp_path / "align")) == 2 and len(losses(tmp_path / "tune")) == 9
