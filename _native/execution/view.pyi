from typing import Any

import numpy as np

from inferd._native.execution.dlpack import Tensor

class View(Tensor):
    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]: ...
    def strings(self) -> list[bytes]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
