"""Types of arrays."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
