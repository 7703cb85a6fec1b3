"""Short names of array types, by the kind and width in bytes of their elements."""

import numpy as np
import numpy.typing as npt

B1 = npt.NDArray[np.bool_]
I1 = npt.NDArray[np.int8]
I4 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint64]
F8 = npt.NDArray[np.float64]
