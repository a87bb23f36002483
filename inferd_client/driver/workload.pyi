from collections.abc import Sequence

class Workload: ...

class Fixed(Workload):
    def __init__(
        self,
        messages: Sequence[bytes] = (),
        expect: Sequence[bytes | tuple[bytes, ...]] | None = None,
        *,
        compressed: bool = False,
    ) -> None: ...
