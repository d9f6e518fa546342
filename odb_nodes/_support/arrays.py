"""Arrays of integers."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

INT64 = np.dtype(np.int64)  # the object that is the dtype of nearly all arrays of int64
