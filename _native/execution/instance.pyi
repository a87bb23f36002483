from inferd._native.execution.loop import ExecutionLoop

class InstanceLoop(ExecutionLoop):
    @property
    def busy_ns(self) -> int: ...
    @property
    def running(self) -> int: ...
