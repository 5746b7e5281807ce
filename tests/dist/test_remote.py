"""Runs whose manifest and media are on a web server: the losses of a disk, and one sentence where it is gone."""

import shutil

import motet.data.remote
from cli.tiny_job import losses
from dist.test_resume import run, train_rank
from ranks import run_ranks
from web import serving


def remote(web, folder):
    return [f"data.train=['{web.url}/train.jsonl']", f"data.cache_folder={folder}"]


def impatient_rank(rank, num_ranks, recipe, overrides, resume):
    motet.data.remote.FIRST_WAIT_S = 0.001
    return train_rank(rank, num_ranks, recipe, overrides, resume)


def test_losses_by_url_are_those_of_the_disk(job, tmp_path):
    run(job, 2, tmp_path / "disk")
    with serving(job.parent) as web:
        # Copies of two or three files at a time: what a later step needs is downloaded again.
        small = "data.cache_bytes=20000"
        run(job, 2, tmp_path / "web", *remote(web, tmp_path / "copies"), small, "data.num_workers=1")
    assert losses(tmp_path / "web") == losses(tmp_path / "disk")


def test_a_server_that_is_gone_is_one_sentence_on_all_ranks(job, tmp_path):
    with serving(job.parent) as web:
        options = [f"run.dir={tmp_path / 'a'}", "data.heldout=[]", *remote(web, tmp_path / "copies")]
        indexed = run_ranks(impatient_rank, 1, str(job), [*options, "run.steps=1"], "auto")
        assert "cannot be reached" not in indexed[0]
        for folder in (tmp_path / "copies").glob("??"):
            shutil.rmtree(folder)
        # The ranks ask for other files, and at other times.
        for path in (job.parent / "media").iterdir():
            web.failing[f"media/{path.name}"] = 10**9
        said = run_ranks(impatient_rank, 2, str(job), [*options, "run.steps=4"], "never")
    assert said[0] == said[1]
    assert f"{web.url}/media/" in said[0] and "cannot be reached, in 5 attempts (" in said[0]
    assert "start again when it can" in said[0]
