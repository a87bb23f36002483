from inferd._native.execution.dlpack import Tensor

class DeviceTensor(Tensor):
    @property
    def device(self) -> int: ...
    @property
    def pointer(self) -> int: ...
