from typing import Any

class PlanError(ValueError):
    step: int

class Analysis:
    tensors: list[str]
    order: list[int]
    scopes: list[int]
    step_scope: list[int]
    tensor_scope: list[int]
    opens: list[int]
    def __init__(self, spec: Any) -> None: ...
