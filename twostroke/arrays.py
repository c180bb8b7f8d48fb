"""Names of the array types that columns are made of."""

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
UInt8s = NDArray[np.uint8]
UInt16s = NDArray[np.uint16]
Bools = NDArray[np.bool_]

NO_TOKENS: Int32s = np.empty(0, np.int32)
