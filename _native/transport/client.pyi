class ClientUse:
    connections: int
    def __init__(
        self,
        name: str,
        *,
        max_calls: int | None = None,
        max_streams: int | None = None,
        max_bytes: int | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def streams(self) -> int: ...
    @property
    def bytes_held(self) -> int: ...
