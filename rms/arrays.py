"""Short names for the arrays that the columns are made of, by the kind and width of their numbers."""

import numpy as np
import numpy.typing as npt

B1 = npt.NDArray[np.bool_]
I1 = npt.NDArray[np.int8]
I4 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint64]
F8 = npt.NDArray[np.float64]
