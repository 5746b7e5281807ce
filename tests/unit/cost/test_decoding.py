import numpy as np
import pytest

from motet.cost.decoding import DecodingCost, DecodingFit, DecodingLoad
from motet.cost.profile import DecodingTimes

AMOUNTS = (1e4, 1e5, 1e6)


def times(start_s, s_per_unit, codec=".png"):
    seconds = tuple(start_s + amount * s_per_unit for amount in AMOUNTS)
    return DecodingTimes(phase="image", codec=codec, amounts=AMOUNTS, seconds=seconds)


def test_a_line_is_found_again_and_has_no_negative_part():
    fit = DecodingFit.of(times(2e-3, 3e-8))
    assert (fit.start_s, fit.s_per_unit) == (pytest.approx(2e-3), pytest.approx(3e-8))
    falling = DecodingTimes(phase="image", codec=".png", amounts=(1.0, 2.0), seconds=(2.0, 1.0))
    assert DecodingFit.of(falling).s_per_unit == 0


def test_a_codec_that_was_not_measured_is_taken_for_the_slowest():
    cost = DecodingCost([times(0.0, 1e-8), times(1e-2, 1e-9, ".jpg")])
    amounts = np.array([1e4, 1e7])
    assert cost.seconds("image", ".png", amounts) == pytest.approx([1e-4, 0.1])
    assert cost.seconds("image", ".webp", amounts) == pytest.approx([1e-2 + 1e-5, 0.1])
    assert cost.seconds("audio", ".wav", amounts) is None


@pytest.mark.parametrize(
    ("num_workers", "cores", "stall_s", "share"), [(1, 4, 1.5, 0.75), (3, 4, 1 / 6, 0.25), (4, 4, 0.0, 0.0)]
)
def test_too_few_workers_make_a_step_as_long_as_decoding(num_workers, cores, stall_s, share):
    load = DecodingLoad(core_s=2.0, step_s=0.5, num_workers=num_workers)
    assert load.cores == cores
    assert (load.stall_s, load.stall_share) == (pytest.approx(stall_s), pytest.approx(share))


def test_points_are_as_many_as_seconds():
    with pytest.raises(ValueError, match="equally many"):
        DecodingTimes(phase="image", codec=".png", amounts=(1.0,), seconds=())
