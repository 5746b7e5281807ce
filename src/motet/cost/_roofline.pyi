"""The native core of analytic.py, csrc/cost/: what its `reference_seconds` computes."""

import numpy as np
from numpy.typing import NDArray

def layer_seconds(
    rows: NDArray[np.float64], pairs: NDArray[np.float64], rates: tuple[float, ...], seconds: NDArray[np.float64]
) -> None:
    """Fill `seconds`, [3, num_microbatches], with those of forward, for the input and for the weights, to the bit.

    rows, pairs: [num_microbatches], contiguous. rates: a `LayerRates`.
    """
