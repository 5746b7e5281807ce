"""Types of numpy arrays by their elements. Docstrings of functions and classes state shapes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
Float64Array = NDArray[np.float64]
Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
