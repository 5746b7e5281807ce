"""A recipe with a generator trains: the same losses on any number of ranks, resumed, exported; and what is refused."""

import base64
import json
import shutil
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, distribute_tensor

from cli.tiny_job import metrics, write_tiny_job
from motet.analyze import analyze
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.data.audio import AudioTransform
from motet.data.media import MediaRef
from motet.dispatch import pack
from motet.dispatch.batch import stacked_media
from motet.dropout import heldout_keys, item_keys
from motet.planning.analyze_recipe import read_subject
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.trainable import obstacle_in
from motet.planning.under_plan import recipe_under_plan
from motet.train.export import _card
from motet.train.job import build_job
from motet.train.recipe.reading import of_phase
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from motet.train.world import join_world
from ranks import run_ranks

GENERATOR = """
[model.generators.draw]
makes = "image"
family = "dit"
num_queries = 3
drop_condition = 0.2
config = { row_dim = 16, hidden = 16, num_layers = 2, num_heads = 2 }
noise = { predicts = "v", min_snr = 5.0 }

[transforms.draw]
patch_size = 4
merge_size = 1
channels = 1
"""
EXACT = ("run.dtype=float64", "run.steps=5", "optimizer.warmup_steps=2", "run.report_to=[]")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A tiny job in which a third of the examples ask for a picture, one of them after a picture and a picture."""
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data", num_train=20, num_heldout=6)
    folder = recipe.parent
    asked = []
    for number, sides in enumerate(((8, 8), (12, 8), (8, 20), (4, 4), (24, 12))):
        name = f"media/drawn-{number}.png"
        Image.effect_noise(sides, 60.0).save(folder / name)
        turns = [{"from": "human", "value": f"draw {'abcde'[number]}"}, {"from": "gpt", "value": "see: <image>"}]
        images = [name]
        if number == 1:
            turns += [{"from": "human", "value": "and this <image>"}, {"from": "gpt", "value": "<image> and <image>"}]
            images += ["media/drawn-0.png", "media/drawn-0.png", name]
        asked.append(json.dumps({"conversations": turns, "image": images}) + "\n")
    for split in ("train", "heldout"):
        file = folder / f"{split}.jsonl"
        file.write_text(file.read_text() + "".join(asked))
    recipe.write_text(recipe.read_text() + GENERATOR)
    return recipe


def train_rank(rank, num_ranks, recipe, overrides):
    with redirect_stdout(StringIO()) as printed:
        try:
            train(load_recipe(Path(recipe), overrides))
        except UserError as error:
            return str(error)
    return printed.getvalue()


def run(recipe, num_ranks, folder, *overrides):
    return run_ranks(train_rank, num_ranks, str(recipe), [*EXACT, f"run.dir={folder}", *overrides])[0]


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """The folder of a run of one process: what all others must equal."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(job, 1, folder, "export.at_end=true", "fsdp.shard_size=1")
    return folder


def test_a_generator_without_anything_to_make_is_refused_unless_it_is_frozen(job, tmp_path):
    lines = job.with_name("train.jsonl").read_text().splitlines(keepends=True)
    without = job.with_name("without.jsonl")
    without.write_text("".join(line for line in lines if "see: <image>" not in line))
    overrides = [f"data.train={json.dumps([str(without)])}", "run.steps=1"]
    said = run(job, 2, tmp_path / "learns", *overrides)
    assert said.startswith("model.generators.draw learns to make items of answers, and no answer of data.train has any")
    assert len(said.splitlines()) == 1
    frozen = [f"model.generators.draw.train_{part}=false" for part in ("generator", "projector")]
    run(job, 1, tmp_path / "frozen", *overrides, *frozen)
    assert len(metrics(tmp_path / "frozen")) == 1


def test_a_run_in_which_nothing_can_learn_is_refused(job, tmp_path):
    """The only part that learns has nothing to read: the examples are text alone."""
    lines = job.with_name("train.jsonl").read_text().splitlines(keepends=True)
    job.with_name("text.jsonl").write_text("".join(line for line in lines if "<image>" not in line))
    frozen = [f"model.generators.draw.train_{part}=false" for part in ("generator", "projector")]
    frozen += ["model.backbone.train=false", "model.encoders.audio.train_encoder=false"]
    frozen += ["model.encoders.audio.train_projector=false", 'data.train=["text.jsonl"]', "data.heldout=[]"]
    said = run(job, 2, tmp_path / "run", *frozen)
    assert said.startswith("Nothing learns: only model.encoders.image would, and no example of data.train has anything")
    assert len(said.splitlines()) == 1


def test_the_card_of_an_export_says_that_a_generator_did_not_learn(job):
    said = _card(load_recipe(job, ["model.generators.draw.train_generator=false"]), num_steps=8)
    assert "All parts learned but draw." in said


def held_out(folder):
    """The held-out losses of tokens and of the generator."""
    summary = json.loads((folder / "summary.json").read_text())
    return [summary["loss_heldout"], summary["losses_heldout"]["draw"]]


def shown(folder):
    """What generators made of held-out prompts: what is said of each, and its pixels."""
    lines = [line | {"step": 0} for line in json.loads((folder / "made.json").read_text())]
    return [{**line, "file": np.asarray(Image.open(folder / line["file"])).tolist()} for line in lines]


@pytest.mark.slow
def test_any_number_of_ranks_takes_the_same_steps(job, alone, tmp_path):
    run(job, 3, tmp_path / "three", "checkpoint.every_steps=2", "run.microbatches=2")
    one, three = metrics(alone), metrics(tmp_path / "three")
    assert len(one) == len(three) == 5
    for a, b in zip(one, three, strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
        assert a["loss"] == pytest.approx(a["losses"]["backbone"] + a["losses"]["draw"])
    assert {name for line in one for name in line["phases"]} == {"backbone", "image", "audio", "draw"}
    assert len({line["losses"]["draw"] for line in one}) == 5
    assert held_out(tmp_path / "three") == pytest.approx(held_out(alone), rel=1e-9)
    # Another run goes on from a checkpoint on other ranks.
    (tmp_path / "three" / "checkpoints" / "step-00000005").rename(tmp_path / "last")
    said = run(job, 2, tmp_path / "three")
    assert "Resuming after step 4" in said
    assert metrics(tmp_path / "three")[-1]["losses"] == pytest.approx(one[-1]["losses"], rel=1e-9)

    exported = alone / "export" / "generators"
    assert load_file(exported / "queries.safetensors")["draw"].shape == (3, 32)
    assert "entrance.nothing" in load_file(exported / "draw" / "model.safetensors")


SAMPLED = (
    "model.generators.draw.sampling={sampler='ddpm',steps=3,guidance=2.0}",
    "evaluate.num_made=4",
    "evaluate.batch_size=2",
)


def evaluate_rank(rank, num_ranks, recipe, overrides):
    """What is made of held-out prompts, the same one by one in one process (None on several)."""
    with join_world("cpu") as world, ExitStack() as cleanup:
        job = build_job(load_recipe(Path(recipe), overrides), world, "never", lambda _: None, cleanup)
        torch.manual_seed(2)
        for _, weight in sorted(job.model.generators.named_parameters()):
            # As initialised, a diffusion transformer predicts zeros.
            drawn = 0.3 * torch.randn(weight.shape, dtype=weight.dtype)
            is_sharded = isinstance(weight, DTensor)
            weight.data.copy_(distribute_tensor(drawn, weight.device_mesh, weight.placements) if is_sharded else drawn)
        found = job.evaluator.run(job.model).made
        return [(item.place, item.number, item.prompt, item.media, item.values) for item in found], one_by_one(job)


def one_by_one(job):
    if job.world.num_ranks > 1:
        return None
    evaluator, made = job.evaluator, {}
    dataset = evaluator._dataset
    job.model.eval()
    for place in range(dataset.num_examples):
        sequence, refs = dataset.tokens(place), dataset.media_refs(place)
        if "draw" not in sequence.media:
            continue
        loaded = [future.result() for future in evaluator._decoder.submit(refs, [dataset.readers_of(r) for r in refs])]
        media, num_tokens = {}, {}
        for name, module in job.model.measured.items():
            items = [item for phase, item in zip(sequence.media, loaded) if phase == name]
            values, sizes = stacked_media(items)
            num_tokens[name] = module.num_tokens(sizes.numpy()) if items else np.zeros(0, np.int64)
            media[name] = values.double(), sizes
        sizes = {"draw": media.pop("draw")[1]}
        number = np.arange(len(sizes["draw"]))
        keys = item_keys(heldout_keys(3, np.array([place])), np.zeros_like(number), number)
        made[place] = job.model.make(pack([sequence], num_tokens), media, sizes, {"draw": keys})["draw"].numpy()
    return made


@pytest.mark.slow
def test_what_is_made_of_prompts_is_the_same_on_any_number_of_ranks(job):
    overrides = [*EXACT, *SAMPLED]
    [(made, expected)] = run_ranks(evaluate_rank, 1, str(job), [*overrides, "fsdp.shard_size=1"])
    assert [(place, number) for place, number, *_ in made] == [(6, 0), (7, 0), (7, 1), (7, 2), (8, 0), (9, 0)]
    for place in {place for place, *_ in made}:
        together = np.concatenate([values for where, *_, values in made if where == place])
        assert together == pytest.approx(expected[place], abs=1e-10)
        assert np.ptp(together) > 0.1
    # Of the second batch a rank has nothing to make.
    for found in run_ranks(evaluate_rank, 3, str(job), overrides):
        for one, other in zip(made, found[0], strict=True):
            assert other[:4] == one[:4]
            assert other[4] == pytest.approx(one[4], abs=1e-10)


def test_clips_are_made_too_and_shown_as_spectrograms(job, tmp_path):
    clip = {"conversations": [{"from": "human", "value": "say b"}, {"from": "gpt", "value": "so: <audio>"}]}
    lines = [json.dumps(clip | {"audio": f"media/{split}-2.wav"}) for split in ("train", "heldout")]
    for split, line in zip(("train", "heldout"), lines, strict=True):
        (job.parent / f"spoken-{split}.jsonl").write_text((job.parent / f"{split}.jsonl").read_text() + line + "\n")
    speaks = job.with_name("speaks.toml")
    config = "config = { row_dim = 20, hidden = 16, num_layers = 1, num_heads = 2 }"
    speaks.write_text(
        f'{job.read_text()}\n[model.generators.speak]\nmakes = "audio"\nfamily = "dit"\nnum_queries = 2\n{config}\n'
    )
    overrides = [f'data.{split}=["spoken-{split}.jsonl"]' for split in ("train", "heldout")]
    overrides += [f"run.dir={tmp_path}", "run.steps=5", "run.report_to=[]", *SAMPLED, "evaluate.num_made=9"]
    run_ranks(train_rank, 1, str(speaks), overrides)
    assert any(line["losses"]["speak"] for line in metrics(tmp_path))
    [spoken] = [item for item in json.loads((tmp_path / "made.json").read_text()) if item["generator"] == "speak"]
    assert (spoken["prompt"], Path(spoken["expected"]).name) == ("say b\nso: ", "heldout-2.wav")
    with Image.open(tmp_path / spoken["file"]) as shown:
        assert shown.height == 20
        assert shown.width > 5  # A column a frame, as many as the held-out clip has.
        frames = shown.width
    with Image.open(tmp_path / spoken["expected_shown"]) as expected:
        assert expected.size == (frames, 20)
        clip = expected.tobytes()
    transform = AudioTransform(num_mels=20)
    loaded = transform.load(MediaRef("audio", spoken["expected"]))
    assert clip == transform.picture(loaded.values, loaded.size).tobytes()
    expected = base64.b64encode((tmp_path / spoken["expected_shown"]).read_bytes()).decode()
    assert expected in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_what_is_made_is_shown(job, tmp_path):
    overrides = [*SAMPLED, "evaluate.every_steps=4", f"run.dir={tmp_path}", "run.steps=5", "run.report_to=[]"]
    run_ranks(train_rank, 1, str(job), overrides)
    made = json.loads((tmp_path / "made.json").read_text())
    assert made[0]["prompt"] == "draw a\nsee: "
    assert made[-1]["step"] == 5
    assert Path(made[0]["expected"]).name == "drawn-0.png"
    with Image.open(tmp_path / made[0]["file"]) as shown:
        assert (shown.size, shown.mode) == ((8, 8), "L")
    assert sorted(folder.name for folder in (tmp_path / "made").iterdir()) == ["step-00000004", "step-00000005"]
    page = (tmp_path / "report.html").read_text()
    assert "made of held-out prompts after step 5" in page
    assert page.count('<div class="made">') == len(made)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("transforms.draw.patch_size=6", "rows of 36 values, but model.generators.draw makes rows of 16"),
        ("transforms.draw.merge_size=2", "takes patches in raster order"),
        ("model.generators.draw.config.num_heads=3", "config.hidden is 16; it must be a multiple of 4, and of"),
        ("model.generators.draw.config.depth=3", "`config.depth` is wrong"),
        ("model.generators.draw.module=a:B", "needs `family`, `path` or `module`, and one of them alone"),
        ("model.generators.draw.sampling.steps=1001", "`sampling.steps` is 1001, but `noise.timesteps` is 1000"),
        ("model.generators.draw.sampling.sampler=euler", "sampling.sampler"),
        ("balance.split=auto", "cannot cut sequences whose query tokens model.generators read whole"),
        ("model.generators.draw.makes=video", "generators.draw.makes"),
    ],
)
def test_what_does_not_fit_is_said(job, tmp_path, override, said):
    with pytest.raises(UserError) as refused:
        train(load_recipe(job, [f"run.dir={tmp_path / 'run'}", *EXACT, override]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def planned(job, *units, **options):
    """A Plan of the job's model on as many H100 as the units have ranks, in float64."""
    where = cluster("h100", 1, max(unit.ranks.stop for unit in units))
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    model = read_job_recipe(job, EXACT).model
    return Plan(model, replace(where, device=device), units, 6, precision="fp64", **options)


def train_planned(rank, num_ranks, recipe, overrides, plan):
    recipe = Path(recipe)
    read, chosen = recipe_under_plan(load_recipe(recipe, overrides), recipe, Path(plan), overrides)
    with redirect_stdout(StringIO()) as printed:
        train(read, chosen=chosen)
    return printed.getvalue()


def run_planned(job, plan, folder, *overrides):
    write_plan(plan, folder.with_suffix(".json"))
    given = [*EXACT, f"run.dir={folder}", *overrides]
    return run_ranks(train_planned, plan.cluster.num_ranks, str(job), given, str(folder.with_suffix(".json")))[0]


@pytest.mark.slow
def test_a_data_parallel_plan_trains_as_the_recipe_does(job, alone, tmp_path):
    blocks = {"image": 1, "audio": 1, "backbone": 2, "draw": 2}
    unit = Unit("all", (blocks,), dp=2, zero=3, recompute=({"draw": 1},))
    plan = planned(job, unit, microbatch_size=3, schedule="data_parallel", balance="auto")
    run_planned(job, plan, tmp_path / "planned", "data.heldout=[]")
    for a, b in zip(metrics(alone), metrics(tmp_path / "planned"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)


def test_plans_with_stages_train_resume_and_evaluate_as_one_process_does(job, alone, tmp_path):
    """A generator behind the backbone on a rank of its own; then, from a checkpoint, in the last stage of a chain."""
    before = {"image": 1, "audio": 1}
    behind = planned(
        job, Unit("llm", (before | {"backbone": 2},), zero=0), Unit("draw", ({"draw": 2},), first_rank=1, zero=0)
    )
    chain = planned(job, Unit("all", (before, {"backbone": 2, "draw": 2}), pp=2, recompute=({}, {"draw": 1})))
    folder = tmp_path / "run"
    run_planned(job, behind, folder, "checkpoint.every_steps=3")
    assert held_out(folder) == pytest.approx(held_out(alone), rel=1e-9)
    assert shown(folder) == shown(alone) != []
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    assert "Resuming after step 3" in run_planned(job, chain, folder, "checkpoint.every_steps=3")
    for a, b in zip(metrics(alone), metrics(folder), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    assert held_out(folder) == pytest.approx(held_out(alone), rel=1e-9)
    assert shown(folder) == shown(alone)


@pytest.mark.slow
def test_a_generator_that_is_cut_trains_resumes_and_evaluates_as_one_process_does(job, alone, tmp_path):
    """Over two stages; then, from a checkpoint, whole. Held-out prompts have pictures in earlier turns."""
    before, folder = {"image": 1, "audio": 1, "backbone": 2}, tmp_path / "run"
    cut = planned(job, Unit("all", (before | {"draw": 1}, {"draw": 1}), pp=2, recompute=({}, {"draw": 1}), zero=1))
    whole = planned(job, Unit("all", (before, {"draw": 2}), pp=2))
    assert not obstacle_in(load_recipe(job, EXACT))(cut)
    run_planned(job, cut, folder, "checkpoint.every_steps=3")
    assert held_out(folder) == pytest.approx(held_out(alone), rel=1e-9)
    assert shown(folder) == shown(alone) != []
    summaries = [json.loads((each / "summary.json").read_text()) for each in (folder, alone)]
    assert summaries[0]["exact_match"] == summaries[1]["exact_match"]
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    assert "Resuming after step 3" in run_planned(job, whole, folder, "checkpoint.every_steps=3")
    for a, b in zip(metrics(alone), metrics(folder), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)


BLOCKS = {"image": 1, "audio": 1, "backbone": 2, "draw": 2}
SHARED = {
    "sequences": ((Unit("all", (BLOCKS,), cp=2, zero=1),), {}),
    "sequences of replicas": ((Unit("all", (BLOCKS,), dp=2, zero=1),), {"balance": "split"}),
    "products": ((Unit("all", (BLOCKS,), dp=2, tp=2, zero=3),), {"schedule": "data_parallel", "balance": "per_phase"}),
    "products of a generator": (
        (Unit("llm", ({"image": 1, "audio": 1, "backbone": 2},)), Unit("draw", ({"draw": 2},), first_rank=1, tp=2)),
        {},
    ),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) for way in SHARED])
def test_ranks_that_share_work_train_and_make_what_one_process_does(job, alone, tmp_path, way):
    """Items are dealt out over the ranks, so that a microbatch with one has it on some of them alone."""
    units, options = SHARED[way]
    plan = planned(job, *units, **options)
    assert not obstacle_in(load_recipe(job, EXACT))(plan)
    run_planned(job, plan, tmp_path / "run")
    for a, b in zip(metrics(alone), metrics(tmp_path / "run"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    assert held_out(tmp_path / "run") == pytest.approx(held_out(alone), rel=1e-9)
    assert shown(tmp_path / "run") == shown(alone) != []


def test_a_phase_freezes_generators_too(job):
    phases = '\n[[run.phase]]\nname = "align"\nsteps = 2\nlearns = "projectors"\n'
    phases += '[[run.phase]]\nname = "make"\nsteps = 2\nlearns = ["draw.generator"]\n'
    phased = job.with_name("phased.toml")
    phased.write_text(job.read_text().replace("steps = 8\n", "") + phases)
    align, make = (load_recipe(phased, of_phase([], name)).modules for name in ("align", "make"))
    assert (align.generators["draw"].train_generator, align.generators["draw"].train_projector) == (False, True)
    assert (make.generators["draw"].train_generator, make.generators["draw"].train_projector) == (True, False)
    assert not make.backbone.train
    assert not make.encoders["image"].train_projector


def with_turns(job):
    """The same job, whose generator is given turns."""
    turns = job.with_name("turns.toml")
    turns.write_text(job.read_text().replace("num_queries = 3", 'condition = "turn"\nmax_turn = 30'))
    return turns


def test_analyze_counts_the_rows_that_items_take(job):
    """Three queries an item, or none where turns are conditions."""
    for recipe, rows in ((job, 3), (with_turns(job), 0)):
        subject, batch_size = read_subject(recipe, EXACT)
        lengths = subject.lengths
        made = lengths.batch.items["draw"]
        assert lengths.tokens_of("draw").sum() == rows * made.num_items
        said = analyze(subject, num_ranks=2, batch_size=batch_size, num_batches=1)
        assert ("draw", "patches") in {(each.name, each.unit) for each in said.lengths}
    assert (made.num_tokens > 0).all()


def test_turns_are_conditions(job, tmp_path):
    """One process, ranks that share items out, and a Plan with a stage behind the backbone take the same steps, and
    make the same of held-out prompts.
    """
    turns = with_turns(job)
    exact = ["run.steps=3", *SAMPLED, "model.generators.draw.drop_condition=0.3"]
    run(turns, 1, tmp_path / "one", *exact, "fsdp.shard_size=1", "export.at_end=true")
    run(turns, 2, tmp_path / "two", *exact, "run.microbatches=2")
    units = Unit("llm", ({"image": 1, "audio": 1, "backbone": 2},), zero=0), Unit("draw", ({"draw": 2},), 1, zero=0)
    where = cluster("h100", 1, 2)
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    model = read_job_recipe(turns, EXACT).model
    plan = Plan(model, replace(where, device=device), units, 6, precision="fp64")
    run_planned(turns, plan, tmp_path / "behind", *exact)
    one = metrics(tmp_path / "one")
    for folder in (tmp_path / "two", tmp_path / "behind"):
        for a, b in zip(one, metrics(folder), strict=True):
            assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
        assert held_out(folder) == pytest.approx(held_out(tmp_path / "one"), rel=1e-9)
        assert shown(folder) == shown(tmp_path / "one") != []
    exported = tmp_path / "one" / "export" / "generators"
    assert load_file(exported / "draw" / "model.safetensors")["entrance.nothing"].shape == (1, 16)
    assert not (exported / "queries.safetensors").exists()
