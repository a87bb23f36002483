from collections.abc import Iterable

from inferd_client.driver.workload import Workload

class Sequences(Workload):
    def __init__(
        self,
        messages: Iterable[bytes],
        *,
        length: int = 20,
        variation: float = 0.0,
        first_id: int = 1,
        last_id: int = ...,
        seed: int = 1,
    ) -> None: ...
