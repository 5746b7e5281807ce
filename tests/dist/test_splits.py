"""Each rank trains on examples of its own, which other ranks do not even have."""

import json
import shutil

import numpy as np
import pytest

import motet.data.decode as decode
import motet.train.input.own_splits as own_splits
from cli.tiny_job import losses, metrics, write_tiny_job
from dist.test_bad_media import spoil_clips
from dist.test_resume import stop_after, train_rank
from motet.core.example import Media
from motet.data.splits import SplitOrder
from ranks import run_ranks

SIZES = (9, 23, 8)
QUIET = ("data.heldout=[]", "run.dtype=float64", "model.encoders.audio.config.dropout=0.0", "run.batch_size=8")
SPLIT = ("data.train=['rank-{rank}.jsonl']", "balance.mode=exchange")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job with all splits in one folder."""
    job = write_tiny_job(tmp_path_factory.mktemp("whole") / "data")
    lines = (job.parent / "train.jsonl").read_text().splitlines(keepends=True)
    ends = np.cumsum((0, *SIZES))
    for number in range(len(SIZES)):
        (job.parent / f"rank-{number}.jsonl").write_text("".join(lines[ends[number] : ends[number + 1]]))
    return job


def own_folders(whole, folder, num_splits):
    """A recipe for each rank, in a folder that has the rank's examples and their files alone."""
    recipes = []
    for number in range(num_splits):
        own = folder / f"machine{number}"
        (own / "media").mkdir(parents=True)
        shutil.copytree(whole.parent / "tokenizer", own / "tokenizer")
        for name in ("recipe.toml", f"rank-{number}.jsonl"):
            shutil.copy(whole.parent / name, own)
        for line in (own / f"rank-{number}.jsonl").read_text().splitlines():
            record = json.loads(line)
            for kind in ("image", "audio"):
                if kind in record:
                    shutil.copy(whole.parent / record[kind], own / record[kind])
        recipes.append(str(own / "recipe.toml"))
    return recipes


def train_own(rank, num_ranks, recipes, overrides, resume="auto"):
    return train_rank(rank, num_ranks, recipes[rank % len(recipes)], overrides, resume)


def run(recipes, num_ranks, run_dir, *overrides, resume="auto"):
    return run_ranks(train_own, num_ranks, recipes, [f"run.dir={run_dir}", *QUIET, *overrides], resume)


def train_in_order_of_splits(rank, num_ranks, recipe, sizes, overrides):
    """One process that can read everything takes the examples in the same order."""
    own_splits.GlobalOrder = lambda _, seed, shuffle: SplitOrder(sizes, seed, shuffle)
    return train_rank(rank, num_ranks, recipe, overrides, "auto")


def train_with_bad_images(rank, num_ranks, recipes, overrides):
    """The images of rank 1 are decoded to NaN."""
    load = decode.load_media

    def spoilt(ref, transform):
        media = load(ref, transform)
        if rank == 1 and ref.name.endswith(".png"):
            media = Media(np.full_like(media.values, np.nan), media.size)
        return media

    decode.load_media = spoilt
    return train_own(rank, num_ranks, recipes, overrides)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_process_that_reads_all(whole, tmp_path, num_ranks):
    recipes = own_folders(whole, tmp_path, num_ranks)
    run(recipes, num_ranks, tmp_path / "split", *SPLIT, "run.microbatches=2")
    names = [str(whole.parent / f"rank-{number}.jsonl") for number in range(num_ranks)]
    overrides = [f"run.dir={tmp_path / 'one'}", *QUIET, f"data.train={names}", "run.microbatches=2"]
    run_ranks(train_in_order_of_splits, 1, str(whole), SIZES[:num_ranks], overrides)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    steps = metrics(tmp_path / "split")
    # A split has most of the examples, and work is balanced over ranks: inputs move.
    assert sum(step["exchange"]["input_bytes"] for step in steps) > 0
    assert [step["num_examples"] for step in steps] == [8] * 8


@pytest.mark.slow
def test_a_resumed_run_goes_on_and_other_ranks_are_refused(whole, tmp_path):
    recipes = own_folders(whole, tmp_path, 2)
    run(recipes, 2, tmp_path / "a", *SPLIT, "checkpoint.every_steps=4")
    uninterrupted = losses(tmp_path / "a")
    stop_after(tmp_path / "a", 4)
    said = run(recipes[:1], 1, tmp_path / "a", *SPLIT)
    assert "was written by 2 ranks, each with examples of its own, and 1 are started: start 2; or, where" in said[0]
    run(recipes, 2, tmp_path / "a", *SPLIT)
    assert losses(tmp_path / "a") == uninterrupted
    # One rank that can read both splits goes on with the same examples.
    shutil.rmtree(tmp_path / "a/step-00000008")
    stop_after(tmp_path / "a", 4)
    run([str(whole)], 1, tmp_path / "a", *SPLIT, "data.num_splits=2")
    assert losses(tmp_path / "a") == pytest.approx(uninterrupted, rel=1e-10)


@pytest.mark.slow
def test_a_bad_example_of_one_rank_is_left_out_on_all(whole, tmp_path):
    recipes = own_folders(whole, tmp_path, 2)
    names = spoil_clips(tmp_path / "machine1", "train-*.wav", 2)
    said = run(recipes, 2, tmp_path / "a", *SPLIT, "data.max_bad_fraction=0.3")
    for name in names:
        (sentence,) = [line for line in said[0].splitlines() if line.startswith("Left out") and name in line]
        assert "machine1/rank-1.jsonl, line " in sentence
    steps = metrics(tmp_path / "a")
    assert [8 - step["num_examples"] for step in steps] == [len(step["left_out"]) for step in steps]
    assert sum(8 - step["num_examples"] for step in steps) >= 2


@pytest.mark.slow
def test_what_is_left_out_from_the_start_is_told_of_every_split(whole, tmp_path):
    recipes = own_folders(whole, tmp_path, 2)
    (lost,) = sorted((tmp_path / "machine1/media").glob("train-*.png"))[:1]
    lost.unlink()
    said = run(recipes, 2, tmp_path / "a", *SPLIT, "run.steps=1", "data.max_bad_fraction=0.3")
    assert "data.train, split 1: 1 of 23 examples left out" in said[0] and lost.name in said[0]
    assert metrics(tmp_path / "a")[0]["bad_examples"] == 1
    said = run(recipes, 2, tmp_path / "b", *SPLIT, "data.max_bad_fraction=0")
    assert said[0] == said[1]
    assert said[0].startswith("1 example has files that cannot be used, of 32 for training")


def test_a_bad_step_names_examples_of_all_ranks(whole, tmp_path):
    recipes = own_folders(whole, tmp_path, 2)
    overrides = [f"run.dir={tmp_path / 'a'}", *QUIET, *SPLIT]
    said = run_ranks(train_with_bad_images, 2, recipes, overrides)
    assert said[0] == said[1] and "machine1/rank-1.jsonl, line " in said[0]
    line = json.loads((tmp_path / "a/bad_steps.jsonl").read_text().splitlines()[0])
    (names,) = line["examples"]
    assert len(names) == 8 and all("rank-" in name and ", line " in name for name in names)
    assert {name.partition("/rank-")[2][0] for name in names} == {"0", "1"}
    assert all("machine1/rank-1.jsonl" in name for name in line["examples_of_cause"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("missing", "machine1/rank-1.jsonl: there is no such file"),
        ("equal", "data.train: the splits 0 and 1 are the same examples, and each must have its own."),
        ("few", "data.num_splits = 1 leaves some of 2 ranks without examples; start 1 rank at most."),
    ],
)
def test_splits_that_cannot_be_stop_all_ranks_with_one_sentence(whole, tmp_path, change, sentence):
    recipes = own_folders(whole, tmp_path, 2)
    if change == "missing":
        (tmp_path / "machine1/rank-1.jsonl").unlink()
    if change == "equal":
        for name in ("media", "rank-1.jsonl"):
            path = tmp_path / "machine1" / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(tmp_path / "machine0/media", tmp_path / "machine1/media")
        shutil.copy(tmp_path / "machine0/rank-0.jsonl", tmp_path / "machine1/rank-1.jsonl")
    said = run(recipes, 2, tmp_path / "a", *SPLIT, *(["data.num_splits=1"] if change == "few" else []))
    assert said[0] == said[1]
    assert sentence in said[0]
