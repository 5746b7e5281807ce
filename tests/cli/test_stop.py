"""Signals, wherever they meet a run: nothing that was trained is lost, and the same command goes on."""

import os
import signal
import subprocess
import sys

import pytest

from cli.meddling import PROGRAM, Meddling, motet
from cli.tiny_job import losses
from motet.train.report.step_lines import heldout_steps
from motet.train.stop import GRACE_S, StopSignal

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TIMEOUT_S = 300
STEP = "motet.runtime.step:TrainStep.run"
END = "stop(signal.SIGTERM, os.getpid())"


def arguments(job, run_dir, *overrides):
    sets = [part for override in (f"run.dir={run_dir}", *overrides) for part in ("--set", override)]
    return ["train", str(job), *sets]


def run(job, run_dir, *overrides, meddling=None):
    return motet(*arguments(job, run_dir, *overrides), meddling=meddling)


def torchrun(job, run_dir, *overrides, meddling=None):
    """Two real ranks. torchrun itself ends with a traceback of its own, where a rank has failed or it is signalled."""
    program = ["-m", "motet"] if meddling is None else [PROGRAM, *meddling.arguments()]
    done = subprocess.run(
        [*TORCHRUN, *program, *arguments(job, run_dir, *overrides)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "terminate called" not in done.stderr
    assert "/src/motet/" not in done.stderr, done.stderr
    return done


def test_signals_that_follow_the_first_at_once_do_not_lose_its_checkpoint(job, tmp_path):
    short = ("data.heldout=[]", "run.steps=4")
    twice = Meddling(STEP, 2, 0, "stop(signal.SIGINT, os.getpid()); stop(signal.SIGTERM, os.getpid())")
    done = run(job, tmp_path, *short, meddling=twice)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")
    assert "Asked to stop: step 2 is saved" in done.stdout
    assert len(losses(tmp_path)) == 2
    done = run(job, tmp_path, *short)
    assert "Resuming after step 2" in done.stdout
    assert len(losses(tmp_path)) == 4


@pytest.mark.slow
@pytest.mark.torchrun
def test_ranks_and_torchrun_and_workers_are_signalled_together(job, tmp_path):
    everywhere = Meddling(STEP, 3, 1, "stop(signal.SIGINT, os.getppid(), *ranks())")
    options = ("data.heldout=[]", "run.steps=6", "data.num_workers=1")
    done = torchrun(job, tmp_path, *options, meddling=everywhere)
    assert done.returncode != 0
    assert done.stdout.count("Asked to stop: step 3 is saved") == 1
    assert len(losses(tmp_path)) == 3
    assert "Resuming after step 3" in run(job, tmp_path, *options).stdout
    assert len(losses(tmp_path)) == 6


def test_workers_outlast_the_signal_that_torchrun_sends_to_the_group_of_a_rank(job, tmp_path):
    """Here while the first step waits for what they load."""
    to_group = Meddling("motet.train.input.loading:IndexLoading.start", 1, 0, "stop(signal.SIGTERM, -os.getpid())")
    options = ("data.heldout=[]", "run.steps=6", "data.num_workers=1")
    leader = Meddling("motet.train.trainer:train", 1, 0, "os.setpgid(0, 0)")
    done = motet(*arguments(job, tmp_path, *options), meddling=[leader, to_group])
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert len(losses(tmp_path)) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_before_training_a_signal_ends_the_run_at_once(job, tmp_path, number, code):
    at_index = Meddling("motet.train.input.opened_examples:open_dataset", 1, 0, f"stop({int(number)}, os.getpid())")
    assert run(job, tmp_path, meddling=at_index) == (code, "", "")


def test_in_an_evaluation_what_was_trained_is_saved(job, tmp_path):
    in_evaluation = Meddling("motet.train.evaluate:Evaluator._load", 1, 0, "stop(signal.SIGTERM, os.getpid())")
    options = ("run.steps=4", "evaluate.every_steps=2", "evaluate.batch_size=4")
    done = run(job, tmp_path, *options, meddling=in_evaluation)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert "Asked to stop: step 2 is saved" in done.stdout
    assert run(job, tmp_path, *options).returncode == 0
    assert len(losses(tmp_path)) == 4
    assert heldout_steps(tmp_path) == [2, 4]


def test_after_training_a_signal_ends_the_run_and_the_rest_is_done_by_the_next(job, tmp_path):
    in_export = Meddling("motet.train.export:export_hf", 1, 0, "stop(signal.SIGINT, os.getpid())")
    options = ("run.steps=2", "data.heldout=[]", "export.at_end=true")
    done = run(job, tmp_path, *options, meddling=in_export)
    assert (done.returncode, done.stderr) == (130, "")
    done = run(job, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert "Resuming after step 2" in done.stdout
    assert len(losses(tmp_path)) == 2
    assert (tmp_path / "export/backbone/model.safetensors").exists()


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


def test_a_signal_long_after_the_first_does_what_it_does_otherwise(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("motet.train.stop.time", clock)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        clock.now_s += GRACE_S / 2
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGINT
        clock.now_s += GRACE_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_so():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.slow
def test_what_a_signal_cuts_short_behind_the_last_step_of_a_phase_is_made_when_the_run_goes_on(job, tmp_path):
    """The phase's last checkpoint is there by then; its export and its report are not."""
    phases = "".join(f'[[run.phase]]\nname = "{name}"\nsteps = 1\nexport.at_end = true\n' for name in ("align", "tune"))
    recipe = job.with_name("phased.toml")
    recipe.write_text(job.read_text().replace("steps = 8\n", "").replace("[data]\n", f"{phases}[data]\n", 1))
    short = ("data.heldout=[]", "run.batch_size=2")
    done = run(recipe, tmp_path, *short, meddling=Meddling("motet.train.trainer:export", 1, 0, END))
    assert (done.returncode, [folder.name for folder in tmp_path.iterdir()]) == (-signal.SIGTERM, ["align"])
    assert (tmp_path / "align/checkpoints/step-00000001").is_dir() and not (tmp_path / "align/export").exists()
    done = run(recipe, tmp_path, *short)
    assert "step-00000001, which is the last step." in done.stdout
    assert all((tmp_path / name / made).exists() for name in ("align", "tune") for made in ("export", "report.html"))
    assert "Phase align (1 of 2) has ended, with step 1." in run(recipe, tmp_path, *short).stdout
