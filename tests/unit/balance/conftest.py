from pathlib import Path

import pytest

from motet.analyze.lengths import read_lengths
from motet.analyze.mixture import Mixture

REAL = Path(__file__).parents[4] / "shared" / "data" / "lengths.csv.gz"


@pytest.fixture(scope="session", params=["sampled", "real"])
def mixture(request):
    """Examples to draw mixed batches from; the real ones only where their table is at hand."""
    if request.param == "sampled":
        return Mixture.sampled(seed=0)
    if not REAL.is_file():
        pytest.skip("no table of real lengths")
    return Mixture.of(read_lengths(REAL))
