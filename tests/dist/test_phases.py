"""`[[run.phase]]`: each phase is the run that one would have started by hand from the weights of the phase before."""

import shutil
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.tiny_job import losses, metrics, write_tiny_job
from motet.core.errors import UserError
from motet.planning.plan_first import plan_first
from motet.train.recipe.reading import of_phase, phase_names
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import PhaseOfRun, train
from ranks import run_ranks

PHASES = """\
[[run.phase]]
name = "align"
steps = 4
learns = "projectors"
optimizer = { lr = 1e-2 }
checkpoint = { every_steps = 2 }

[[run.phase]]
name = "tune"
steps = 3
learns = ["backbone", "image"]
data = { seed = 7 }

[data]
"""
EXACT = ("run.dtype=float64", "data.heldout=[]")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A recipe in phases, and the same without them."""
    plain = write_tiny_job(tmp_path_factory.mktemp("job") / "data")
    text = plain.read_text()
    phased = plain.with_name("phased.toml")
    phased.write_text(text.replace("steps = 8\n", "").replace("[data]\n", PHASES, 1))
    return phased, plain


def train_rank(rank, num_ranks, recipe, overrides, resume="auto"):
    """Train all phases; what was printed, or the sentence with which it ended."""
    path = Path(recipe)
    names = phase_names(path, overrides)
    with redirect_stdout(StringIO()) as printed:
        try:
            folders = [load_recipe(path, of_phase(overrides, name)).run.dir for name in names]
            for number, name in enumerate(names, start=1):
                chosen = of_phase(overrides, name)
                read = load_recipe(path, chosen)
                plan = partial(plan_first, read, path, chosen) if read.parallel else None
                phase = PhaseOfRun(name, number, len(names), tuple(folders[number:]))
                train(read, resume=resume, plan=plan, phase=phase)
            if not names:
                train(load_recipe(path, overrides), resume=resume)
        except UserError as error:
            return str(error)
    return printed.getvalue()


def run(recipe, num_ranks, folder, *overrides, resume="auto"):
    return run_ranks(train_rank, num_ranks, str(recipe), [*EXACT, f"run.dir={folder}", *overrides], resume)[0]


def weights(folder, step):
    """Name -> weight of a checkpoint that one rank wrote."""
    stored = load_file(folder / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")
    return {name: tensor for name, tensor in stored.items() if name.startswith("model.")}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_phases_are_runs_by_hand_and_what_does_not_learn_stays(jobs, tmp_path):
    phased, plain = jobs
    said = run(phased, 1, tmp_path / "a")
    assert f"Phase align (1 of 2): 4 steps, in {tmp_path}/a/align." in said
    assert f"Beginning with the weights of {tmp_path}/a/align/checkpoints/step-00000004." in said

    frozen = [f"model.encoders.{name}.train_encoder=false" for name in ("image", "audio")]
    by_hand = tmp_path / "by-hand"
    run(plain, 1, by_hand, *frozen, "model.backbone.train=false", "run.steps=4", "optimizer.lr=1e-2")
    audio = ["model.encoders.audio.train_encoder=false", "model.encoders.audio.train_projector=false"]
    start = f"run.start={by_hand}/checkpoints/step-00000004"
    run(plain, 1, tmp_path / "then", *audio, start, "run.steps=3", "data.seed=7")
    assert losses(tmp_path / "a/align") == losses(by_hand)
    assert losses(tmp_path / "a/tune") == losses(tmp_path / "then")

    aligned, tuned = weights(tmp_path / "a/align", 4), weights(tmp_path / "a/tune", 3)
    learnt = changed(weights(tmp_path / "a/align", 2), aligned)
    assert learnt and all("projector" in name for name in learnt)
    assert (learnt := changed(aligned, tuned)) and not [name for name in learnt if "encoders.audio" in name]
    assert {True, False} == {"backbone" in name for name in learnt}


@pytest.mark.slow
def test_a_phase_of_epochs_hands_on_its_last_step_as_the_folder_of_a_run_does(jobs, tmp_path):
    phased, plain = jobs
    recipe = phased.with_name("epochs.toml")
    recipe.write_text(phased.read_text().replace("\nsteps = 4", "\nepochs = 0.55"))  # 22 of 40 examples, 6 a step
    early = run(recipe, 1, tmp_path, "run.phase=tune")
    assert early == f"run.start: {tmp_path}/align is no complete Motet checkpoint: there is no such folder."
    said = run(recipe, 1, tmp_path)
    assert f"Phase align (1 of 2): 0.55 epochs, in {tmp_path}/align." in said
    assert f"Beginning with the weights of {tmp_path}/align/checkpoints/step-00000004." in said
    audio = ["model.encoders.audio.train_encoder=false", "model.encoders.audio.train_projector=false"]
    run(plain, 1, tmp_path / "then", *audio, f"run.start={tmp_path}/align", "run.steps=3", "data.seed=7")
    assert losses(tmp_path / "tune") == losses(tmp_path / "then")
    recipe.write_text(recipe.read_text().replace("epochs = 0.55", "epochs = 0.65"))
    assert "began with the weights of another checkpoint" in run(recipe, 1, tmp_path)
    assert len(losses(tmp_path / "align")) == 5


@pytest.mark.slow
def test_adapters_go_on_in_the_next_phase_also_where_they_do_not_learn(jobs, tmp_path):
    phased, _ = jobs
    lora = "model = { lora = { backbone = { rank = 2 } } }"
    frozen = lora.replace("model = { ", 'model = { freeze = ["*.lora_*"], ')
    recipe = phased.with_name("adapted.toml")
    text = phased.read_text().replace('learns = "projectors"', f'learns = ["backbone", "projectors"]\n{lora}')
    recipe.write_text(text.replace('learns = ["backbone", "image"]', f'learns = ["backbone", "image"]\n{frozen}'))
    assert "Beginning with the weights of" in run(recipe, 1, tmp_path)
    before, after = weights(tmp_path / "align", 4), weights(tmp_path / "tune", 3)
    adapters = {name for name in before if "lora" in name}
    assert adapters and all(before[name].any() for name in adapters)
    assert (learnt := changed(before, after)) and not learnt & adapters


@pytest.mark.slow
def test_on_two_ranks_and_planned_anew_the_losses_are_the_same(jobs, tmp_path):
    phased, _ = jobs
    run(phased, 1, tmp_path / "alone")
    run(phased, 2, tmp_path / "both")
    pipeline = tmp_path / "data" / "phased.toml"
    shutil.copytree(phased.parent, pipeline.parent)
    pipeline.write_text(
        phased.read_text().replace("data = { seed", "parallel = { backbone = { pp = 2 } }\ndata = { seed")
    )
    run(pipeline, 2, tmp_path / "planned")
    for name in ("align", "tune"):
        for folder in ("both", "planned"):
            assert losses(tmp_path / folder / name) == pytest.approx(losses(tmp_path / "alone" / name), rel=1e-10)
    assert {step["plan"] is None for step in metrics(tmp_path / "planned/align")} == {True}
    assert {step["plan"] is None for step in metrics(tmp_path / "planned/tune")} == {False}


@pytest.mark.slow
def test_a_run_goes_on_inside_a_phase_and_passes_over_those_that_ended(jobs, tmp_path):
    phased, _ = jobs
    run(phased, 1, tmp_path)
    whole = losses(tmp_path / "align"), losses(tmp_path / "tune")
    shutil.rmtree(tmp_path / "tune")
    assert "Phase align (1 of 2) has ended, with step 4." in run(phased, 1, tmp_path)
    assert losses(tmp_path / "tune") == whole[1]
    shutil.rmtree(tmp_path / "tune")
    shutil.rmtree(tmp_path / "align/checkpoints/step-00000004")
    assert "Resuming after step 2" in run(phased, 1, tmp_path)
    assert (losses(tmp_path / "align"), losses(tmp_path / "tune")) == whole


@pytest.mark.slow
def test_phases_before_one_that_has_begun_are_neither_trained_again_nor_longer(jobs, tmp_path):
    """Their checkpoints may be removed, as the one that has begun has its own; it would not go on behind others."""
    phased, _ = jobs
    recipe = phased.with_name("three.toml")
    third = '[[run.phase]]\nname = "last"\nsteps = 1\n\n'
    recipe.write_text(
        phased.read_text().replace("steps = 3", "epochs = 0.1").replace("[data]\n", f"{third}[data]\n", 1)
    )
    run(recipe, 1, tmp_path)
    whole = losses(tmp_path / "align"), losses(tmp_path / "last")
    longer = recipe.with_name("longer.toml")
    longer.write_text(recipe.read_text().replace("steps = 4", "steps = 6"))
    said = run_ranks(train_rank, 2, str(longer), [*EXACT, f"run.dir={tmp_path}"])
    begun = tmp_path / "tune/checkpoints"
    assert said[0] == said[1]
    assert said[0] == (
        f"{tmp_path}/align/checkpoints has no checkpoint of step 6, the last one of its training phase, and {begun} "
        "has some of a phase behind it, which began with other weights than this one would end with: "
        f"remove {begun} to train that phase anew, or state the steps that this one had."
    )
    for name in ("align", "tune"):
        shutil.rmtree(tmp_path / name / "checkpoints")
    said = run(recipe, 1, tmp_path)
    assert "Phase align (1 of 3) has ended, with step 4." in said and "Phase tune (2 of 3) has ended, with 0.1 " in said
    assert "Resuming after step 1 from" in said and (losses(tmp_path / "align"), losses(tmp_path / "last")) == whole


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_phase_goes_back_where_the_next_cannot_begin_with_its_last_checkpoint(jobs, tmp_path, num_ranks):
    phased, _ = jobs
    run(phased, num_ranks, tmp_path)
    whole = losses(tmp_path / "align"), losses(tmp_path / "tune")
    last = tmp_path / "align/checkpoints/step-00000004"

    def damage():
        stored = bytearray((last / "rank-00000.safetensors").read_bytes())
        stored[-1] ^= 1
        (last / "rank-00000.safetensors").write_bytes(stored)

    damage()
    assert "Phase align (1 of 2) has ended, with step 4." in run(phased, num_ranks, tmp_path), "tune has its weights"
    shutil.rmtree(tmp_path / "tune")
    said = run(phased, num_ranks, tmp_path)
    assert f"{last} is damaged: rank-00000.safetensors" in said and "It is kept as step-00000004.damaged." in said
    assert f"Resuming after step 2 from {last.with_name('step-00000002')}." in said
    assert (losses(tmp_path / "align"), losses(tmp_path / "tune")) == whole
    shutil.rmtree(tmp_path / "tune")
    shutil.rmtree(last.with_name("step-00000002"))
    damage()
    said = run(phased, num_ranks, tmp_path)
    assert said.startswith(f"{last.parent} holds no whole checkpoint to go on from, only others")


@pytest.mark.slow
def test_a_phase_on_weights_that_have_changed_is_refused(jobs, tmp_path):
    phased, _ = jobs
    run(phased, 1, tmp_path)
    run(phased, 1, tmp_path, "run.phase=align", "optimizer.lr=1e-3", resume="never")
    assert run(phased, 1, tmp_path) == (
        f"The run of the checkpoint {tmp_path}/tune/checkpoints/step-00000003 began with the weights of another "
        f"checkpoint, not with those of run.start = {tmp_path}/align/checkpoints/step-00000004: set run.start back, or "
        "start anew with --resume never."
    )
    shutil.rmtree(tmp_path / "align")
    said = run(phased, 1, tmp_path, "run.phase=tune", resume="never")
    assert said.startswith(f"run.start: {tmp_path}/align/checkpoints/step-00000004 is no complete Motet checkpoint")


def test_a_model_of_which_nothing_learns_is_refused_on_all_ranks(jobs, tmp_path):
    phased, _ = jobs
    said = run_ranks(
        train_rank, 2, str(phased), [*EXACT, f"run.dir={tmp_path}", "run.phase=align", 'model.freeze=["*"]']
    )
    assert [each.partition(":")[0] for each in said] == ["Nothing learns"] * 2
