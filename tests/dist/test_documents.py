"""Training and evaluation on documents and on media that records hold: the same on any ranks as with files."""

import base64
import json

import pytest

from cli.tiny_job import losses, write_tiny_job
from dist.test_resume import train_rank
from ranks import run_ranks

QUIET = ("run.dtype=float64", "run.steps=3", "model.encoders.audio.config.dropout=0.0", "evaluate.batch_size=3")


def as_document(record):
    """The turns as one text; the same items in the same order."""
    text = "\n".join(turn["value"] for turn in record["conversations"])
    return {"text": text, **{kind: record[kind] for kind in ("image", "audio") if kind in record}}


def held(record, folder):
    """The record with the bytes of its files in place of their names."""
    urls = {
        kind: f"data:;base64,{base64.b64encode((folder / record[kind]).read_bytes()).decode()}"
        for kind in ("image", "audio")
        if kind in record
    }
    return record | urls


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = write_tiny_job(tmp_path_factory.mktemp("documents") / "data", num_train=18, num_heldout=5)
    folder = job.parent
    for name in ("train", "heldout"):
        records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        documents = [as_document(record) if number % 2 else record for number, record in enumerate(records)]
        for file, written in (
            (name, documents),
            (f"{name}-held", [held(record, folder) for record in documents]),
            (f"{name}-documents", [as_document(record) for record in records]),
        ):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in written))
    return job


def run(job, num_ranks, run_dir, *overrides):
    said = run_ranks(train_rank, num_ranks, str(job), [f"run.dir={run_dir}", *QUIET, *overrides], "never")
    assert (run_dir / "summary.json").exists(), said
    return losses(run_dir), json.loads((run_dir / "summary.json").read_text())


def test_documents_and_held_media_train_as_files_do(job, tmp_path):
    alone, at_end = run(job, 1, tmp_path / "a")
    both, of_both = run(
        job, 2, tmp_path / "b", "data.train=['train-held.jsonl']", "data.heldout=['heldout-held.jsonl']"
    )
    assert both == pytest.approx(alone, rel=1e-10)
    assert of_both["exact_match"].keys() == at_end["exact_match"].keys() == {"text", "audio"}
    assert of_both["loss_heldout"] == pytest.approx(at_end["loss_heldout"], rel=1e-10)


@pytest.mark.slow
def test_held_out_documents_have_a_loss_and_no_answers(job, tmp_path):
    _, at_end = run(job, 2, tmp_path, "data.heldout=['heldout-documents.jsonl']", "run.steps=1")
    assert at_end["exact_match"] == {} and at_end["loss_heldout"] > 0
