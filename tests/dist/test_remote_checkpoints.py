"""Checkpoints copied to a URL: another machine goes on from them as the first one would have."""

import json
import shutil

import pytest

import motet.data.remote
from cli.tiny_job import losses, metrics
from dist.test_resume import run, train_rank
from motet.core.errors import UserError
from motet.train import trainer
from motet.train.checkpoint.folder import checkpoints
from motet.train.checkpoint.remote import RemoteCheckpoints, checkpoint_at
from motet.train.checkpoint.saving import CheckpointConfig
from ranks import run_ranks


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def saved(job, tmp_path_factory):
    """A run whose checkpoints were copied: its folder, the store, and the losses of all its steps."""
    folder = tmp_path_factory.mktemp("saved")
    said = run(job, 2, folder / "a", "checkpoint.every_steps=3", f"checkpoint.url=file://{folder}/store")
    assert "Traceback" not in said[0]
    return folder / "a", folder / "store", losses(folder / "a")


def test_the_store_has_the_last_ones_whole(saved):
    run_dir, store, _ = saved
    assert names(store) == ["latest.json", "step-00000006", "step-00000008"]
    assert json.loads((store / "latest.json").read_text()) == {"line": ["step-00000006", "step-00000008"]}
    for path in checkpoints(run_dir / "checkpoints"):
        assert {each.name: each.read_bytes() for each in path.iterdir()} == {
            each.name: each.read_bytes() for each in (store / path.name).iterdir()
        }


@pytest.mark.parametrize("resume", ["auto", "url"])
def test_another_machine_goes_on_with_the_same_losses(job, saved, tmp_path, resume):
    _, store, whole = saved
    shutil.copytree(store, tmp_path / "store")
    store = f"file://{tmp_path}/store"
    options = []
    if resume == "auto":
        # As the first machine has left it after step 6.
        (tmp_path / "store/latest.json").write_text(json.dumps({"line": ["step-00000006"]}))
        options = [f"checkpoint.url={store}"]
    said = run(job, 1, tmp_path / "b", *options, resume=f"{store}/step-00000006" if resume == "url" else "auto")
    assert "Fetching file://" in said[0] and "Resuming after step 6 from" in said[0]
    assert [step["loss"] for step in metrics(tmp_path / "b")] == pytest.approx(whole[6:], rel=1e-4)
    if resume == "auto":
        line = json.loads((tmp_path / "store/latest.json").read_text())["line"]
        assert line == ["step-00000006", "step-00000008"]


def test_one_that_was_damaged_on_the_way_is_not_taken(job, saved, tmp_path):
    shutil.copytree(saved[1], tmp_path / "store")
    shard = tmp_path / "store/step-00000008/rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    url = f"file://{tmp_path}/store/step-00000008"
    said = run(job, 2, tmp_path / "b", resume=url)
    assert said[0] == said[1]
    assert "is no complete Motet checkpoint: rank-00000.safetensors is not as it was written" in said[0]
    (tmp_path / "store/step-00000008/manifest.json").unlink()
    said = run(job, 2, tmp_path / "c", resume=url)
    assert said == [f"{url} is no complete Motet checkpoint: manifest.json is missing"] * 2


@pytest.mark.slow
def test_a_run_that_went_back_is_what_others_go_on_from(job, saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "a")
    shutil.copytree(saved[1], tmp_path / "store")
    url = f"checkpoint.url=file://{tmp_path}/store"
    back = str(tmp_path / "a/checkpoints/step-00000006")
    run(job, 2, tmp_path / "a", url, "run.steps=7", resume=back)
    assert json.loads((tmp_path / "store/latest.json").read_text())["line"] == ["step-00000006", "step-00000007"]
    said = run(job, 1, tmp_path / "b", url)
    assert "Resuming after step 7 from" in said[0]


@pytest.mark.slow
def test_another_run_begins_with_weights_by_url(job, saved, tmp_path):
    """Those of the folder; and goes on, also when they are gone there, but not with others."""
    shutil.copytree(saved[1], tmp_path / "store")
    url = f"file://{tmp_path}/store/step-00000006"
    few = ("run.steps=2", "checkpoint.every_steps=1")
    there = run(job, 2, tmp_path / "b", f"run.start={url}", *few, resume="never")
    run(job, 1, tmp_path / "c", f"run.start={saved[0]}/checkpoints/step-00000006", *few, resume="never")
    assert f"Beginning with the weights of {url}." in there[0]
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "c"), rel=1e-4)
    shutil.rmtree(tmp_path / "b/checkpoints/step-00000002")
    other = run(job, 1, tmp_path / "b", f"run.start=file://{tmp_path}/store/step-00000008", *few)
    assert "began with the weights of another checkpoint, not with those of run.start" in other[0]
    shutil.rmtree(tmp_path / "store")
    assert "Resuming after step 1" in run(job, 1, tmp_path / "b", f"run.start={url}", *few)[0]


def unwritable_rank(rank, num_ranks, recipe, overrides, resume):
    motet.data.remote.FIRST_WAIT_S = 0.001
    return train_rank(rank, num_ranks, recipe, overrides, resume)


def test_a_store_that_takes_nothing_ends_the_run_on_all_ranks(job, tmp_path):
    (tmp_path / "store").write_text("a file, where a folder must be")
    options = [f"run.dir={tmp_path / 'a'}", "data.heldout=[]", "run.steps=2", f"checkpoint.url=file://{tmp_path}/store"]
    said = run_ranks(unwritable_rank, 2, str(job), options, "never")
    assert said[0] == said[1]
    assert f"and could not be copied to file://{tmp_path}/store: " in said[0]
    # The step is not lost.
    assert names(tmp_path / "a/checkpoints") == ["step-00000002"]
    # Nor is it left here alone, once the store is back.
    (tmp_path / "store").unlink()
    said = run_ranks(train_rank, 2, str(job), options, "auto")
    assert "Resuming after step 2 from" in said[0]
    assert names(tmp_path / "store") == ["latest.json", "step-00000002"]


def test_what_names_no_checkpoint_is_refused():
    with pytest.raises(UserError, match=r"s3://bucket/run names no checkpoint: its URL ends with step-N"):
        checkpoint_at("s3://bucket/run")
    for url in ("https://example.org/run", "bucket/run", "s3://", "s3://bucket/"):
        with pytest.raises(ValueError, match="url"):
            CheckpointConfig(url=url)
    assert CheckpointConfig(url="s3://bucket/run").url == "s3://bucket/run"


@pytest.mark.parametrize("text", ["{}", "[]", '{"line": ["../x"]}', "no JSON"])
def test_a_url_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(UserError, match=r"latest\.json is not what Motet writes"):
        RemoteCheckpoints(f"file://{tmp_path}").line()


def dying_rank(rank, num_ranks, recipe, overrides):
    trainer._Run._train = die
    return train_rank(rank, num_ranks, recipe, overrides, "never")


def die(run):
    raise UserError("dies before its first checkpoint")


def test_a_run_that_starts_anew_is_not_taken_for_the_one_before(job, saved, tmp_path):
    shutil.copytree(saved[1], tmp_path / "store")
    options = [f"run.dir={tmp_path / 'a'}", f"checkpoint.url=file://{tmp_path}/store", "data.heldout=[]", "run.steps=1"]
    own = f"run.start=file://{tmp_path}/store/step-00000008"
    assert (
        "is one of the checkpoints that --resume never removes"
        in run_ranks(dying_rank, 1, str(job), [*options, own])[0]
    )
    assert run_ranks(dying_rank, 1, str(job), options) == ["dies before its first checkpoint"]
    assert not list((tmp_path / "store").iterdir())
    said = run_ranks(train_rank, 1, str(job), options, "auto")
    assert "Resuming" not in said[0] and len(losses(tmp_path / "a")) == 1


def test_a_store_that_is_a_file_is_said(job, tmp_path):
    (tmp_path / "store").write_text("a file, where a folder must be")
    assert RemoteCheckpoints(f"file://{tmp_path}/store").line() == []
