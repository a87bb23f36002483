def adopt_orphans() -> None: ...
def spawn(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    descriptors: list[int],
    outlives: bool = False,
) -> int: ...
