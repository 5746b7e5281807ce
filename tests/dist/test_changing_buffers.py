"""Buffers that change as a model trains end a run of several ranks in one sentence."""

import pytest
from torch import nn

from cli.tiny_job import losses, write_tiny_job
from dist.test_resume import run
from parity.tiny import ToyEncoder


class Normed(ToyEncoder):
    """With statistics of the rows that it was given."""

    def __init__(self, row_dim: int = 20) -> None:
        super().__init__(row_dim, cost="packed")
        self.batch_norm = nn.BatchNorm1d(row_dim)

    def forward(self, values, sizes):
        return super().forward(self.batch_norm(values), sizes)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data")
    text = recipe.read_text()
    first, stop = text.index("[model.encoders.audio]"), text.index("[transforms.image]")
    own = f'[model.encoders.audio]\nmodule = "{__name__}:Normed"\nprojector = {{ kind = "linear" }}\n\n'
    recipe.write_text(text[:first] + own + text[stop:])
    return recipe


def test_statistics_of_a_layer_that_learns_are_refused(job, tmp_path):
    for said in run(job, 2, tmp_path / "a"):
        assert said.startswith("The buffer encoders.audio.encoder.batch_norm.running_mean changes as the model trains")
        assert "\n" not in said and not [*(tmp_path / "a").glob("checkpoints/*")]


@pytest.mark.slow
def test_frozen_ones_stay_and_one_rank_may_have_its_own(job, tmp_path):
    run(job, 2, tmp_path / "a", "model.encoders.audio.train_encoder=false")
    run(job, 1, tmp_path / "b")
    assert len(losses(tmp_path / "a")) == len(losses(tmp_path / "b")) == 8
