"""Checkpoints at a URL: which are kept there, and what a copy that is broken off leaves."""

import pytest

import motet.train.checkpoint.remote
from motet.core.errors import UserError
from motet.train.checkpoint.folder import checkpoints
from motet.train.checkpoint.remote import RemoteCheckpoints
from unit.train.checkpoint.small_run import write_checkpoints

FOUR, SIX, EIGHT = (f"step-{step:08d}" for step in (4, 6, 8))


@pytest.fixture
def store(run, tmp_path):
    """A store with the checkpoints of a run."""
    stored = RemoteCheckpoints(f"file://{tmp_path}/store")
    stored.save(run / FOUR, [FOUR], keep=9)
    stored.save(run / EIGHT, [FOUR, EIGHT], keep=9)
    return stored


def failing(name, when):
    """The function of a name, which fails once `when` is in what it is given."""
    own = getattr(motet.train.checkpoint.remote, name)

    def called(one, other):
        if when in str(one):
            raise UserError("the store is gone")
        return own(one, other)

    return called


@pytest.mark.parametrize(("keep", "kept"), [(9, [FOUR, SIX, EIGHT]), (2, [SIX, EIGHT])])
def test_a_machine_that_fetched_the_newest_alone_keeps_as_many(tmp_path, keep, kept):
    write_checkpoints(tmp_path / "whole", (4, 6, 8))
    store = RemoteCheckpoints(f"file://{tmp_path}/store")
    store.save(tmp_path / "whole" / FOUR, [FOUR], keep)
    store.save(tmp_path / "whole" / SIX, [FOUR, SIX], keep)
    store.save(tmp_path / "whole" / EIGHT, [SIX, EIGHT], keep)
    assert store.line() == kept == [path.name for path in checkpoints(tmp_path / "store")]


def test_while_a_step_is_copied_anew_others_go_on_from_the_one_before(store, run, tmp_path, monkeypatch):
    """A run that went back to step 4 has come to step 8 again."""
    monkeypatch.setattr("motet.train.checkpoint.remote.put_file", failing("put_file", "rank-00000"))
    with pytest.raises(UserError, match="the store is gone"):
        store.save(run / EIGHT, [FOUR, EIGHT], keep=9)
    assert store.line() == [FOUR]
    store.fetch(store.line()[-1], tmp_path)


def test_a_fetch_that_is_broken_off_leaves_the_folder_as_it_was(store, tmp_path, monkeypatch):
    write_checkpoints(tmp_path / "own", (6, 8))
    before = checkpoints(tmp_path / "own")
    monkeypatch.setattr("motet.train.checkpoint.remote._download", failing("_download", "rank-00000"))
    manifest = tmp_path / "store" / EIGHT / "manifest.json"
    assert manifest.read_bytes() != (tmp_path / "own" / EIGHT / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="the store is gone"):
        store.fetch(EIGHT, tmp_path / "own")
    assert checkpoints(tmp_path / "own") == before
