from collections.abc import Mapping, Sequence

from inferd._native.request.lane import LaneHandle

class ModelTable:
    def set(
        self,
        name: str,
        versions: Mapping[int, LaneHandle | None],
        departing: Sequence[tuple[int, LaneHandle]] = (),
        labels: Sequence[tuple[str, int]] = (),
    ) -> None: ...
    def remove(self, name: str) -> None: ...
    def find(self, name: str, version: str = "") -> tuple[int, str]: ...
