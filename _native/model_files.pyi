from collections.abc import Collection
from typing import NamedTuple

class Mark(NamedTuple):
    digest: int
    files: int
    size: int

NO_FILES: Mark

def look_at_parts(path: str, most: int) -> tuple[dict[str, Mark], bool]: ...
def folders_in(path: str) -> tuple[list[str], bool]: ...

class Watch:
    def end(self) -> None: ...
    def look(self, path: str, but: Collection[str], most: int) -> dict[str, int]: ...
