import numpy as np
import pytest

from motet.analyze.lengths import read_lengths
from motet.analyze.mixture import Caps, Mixture

ROWS = """num_images,image_tokens,audio_seconds,text_tokens
5,1280,,80
,,3.2,12
,,,300
2,101,1.0,7
"""


def test_examples_by_kind(tmp_path):
    (tmp_path / "lengths.csv").write_text(ROWS)
    mixture = Mixture.of(read_lengths(tmp_path / "lengths.csv"))
    assert mixture.text.tolist() == [[300, 0, 0]]
    assert mixture.speech.tolist() == [[92, 0, 320]]
    assert mixture.image.tolist() == [[1360, 5125, 0], [133, 404, 100]]


def test_a_third_of_each_kind_cut_to_the_caps():
    mixture = Mixture.sampled(seed=1, num_examples=500)
    rows = mixture.draw(100, np.random.default_rng(0), Caps(tokens=900, patches=1500, audio_s=9))
    assert rows.shape == (100, 3)
    assert rows.max(axis=0).tolist() == [900, 1500, 900]
    assert ((rows[:, 1:] > 0).sum(axis=0) == 33).all()
    whole = mixture.draw(100, np.random.default_rng(0), None)
    assert (whole.max(axis=0) > [900, 1500, 900]).all()


def test_a_workload_draws_each_kind_equally_often_if_asked_to(tmp_path):
    table = tmp_path / "lengths.csv"
    table.write_text("text_tokens,audio_seconds\n" + "10,\n" * 9 + "20,3.0\n")
    lengths = read_lengths(table)
    rng = np.random.default_rng(0)
    rows, even = (lengths.workload(even=even).draw(2000, rng) for even in (False, True))
    assert rows.items["audio"].num_items / 2000 == pytest.approx(0.1, abs=0.03)
    assert even.items["audio"].num_items / 2000 == pytest.approx(0.5, abs=0.05)
    # A table does not say what is learnt: loss is taken on all of its text.
    assert set(even.num_targets.tolist()) == {10, 20}
