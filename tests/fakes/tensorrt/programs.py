"""What the fake plans compute. Inputs and outputs are arrays by name, batch dimension included."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Dims = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]


class Program:
    """y = 2 x."""

    def shapes(self, shapes: Mapping[str, Dims], values: Arrays) -> dict[str, Dims]:
        """The shapes of the outputs; -1 where data decide."""
        return {"y": shapes["x"]}

    def bound(self, shapes: Mapping[str, Dims]) -> int:
        """Elements that an output may have whose shape data decide."""
        return int(np.prod(shapes["x"], dtype=np.int64))

    def compute(self, inputs: Arrays, values: Arrays) -> dict[str, np.ndarray]:
        """What the device computes."""
        return {"y": inputs["x"] + inputs["x"]}

    def host(self, values: Arrays, shapes: Mapping[str, Dims]) -> dict[str, np.ndarray]:
        """Outputs that are shape tensors: TensorRT computes them on the host."""
        return {}


class Copy(Program):
    """y is x, whatever its bits mean."""

    def compute(self, inputs: Arrays, values: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"]}


class Both(Program):
    """y = x + 1 and z = x - 1."""

    def shapes(self, shapes: Mapping[str, Dims], values: Arrays) -> dict[str, Dims]:
        return {"y": shapes["x"], "z": shapes["x"]}

    def compute(self, inputs: Arrays, values: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"] + 1, "z": inputs["x"] - 1}


class Positive(Program):
    """y are the elements of x that are greater than 0: how many, only the data tell."""

    def shapes(self, shapes: Mapping[str, Dims], values: Arrays) -> dict[str, Dims]:
        return {"y": (-1,)}

    def compute(self, inputs: Arrays, values: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"][inputs["x"] > 0]}


class Tile(Program):
    """y of the shape that s says, which begins with the batch size: each row full of x's first column.

    t is s, as a shape tensor. More than 100 elements cannot be.
    """

    def shapes(self, shapes: Mapping[str, Dims], values: Arrays) -> dict[str, Dims]:
        if values["s"][0] != shapes["x"][0] or values["s"].prod() > 100:
            raise RuntimeError("dimensions not compatible for tile")
        return {"y": tuple(int(each) for each in values["s"]), "t": (len(values["s"]),)}

    def compute(self, inputs: Arrays, values: Arrays) -> dict[str, np.ndarray]:
        shape = tuple(int(each) for each in values["s"])
        column = inputs["x"][:, 0].reshape((shape[0],) + (1,) * (len(shape) - 1))
        return {"y": np.broadcast_to(column, shape)}

    def host(self, values: Arrays, shapes: Mapping[str, Dims]) -> dict[str, np.ndarray]:
        return {"t": values["s"]}


class Sum(Program):
    """y and after are before + x."""

    def shapes(self, shapes: Mapping[str, Dims], values: Arrays) -> dict[str, Dims]:
        return {"y": shapes["x"], "after": shapes["x"]}

    def compute(self, inputs: Arrays, values: Arrays) -> dict[str, np.ndarray]:
        total = inputs["before"] + inputs["x"]
        return {"y": total, "after": total}


PROGRAMS: Mapping[str, Program] = {
    "double": Program(),
    "copy": Copy(),
    "both": Both(),
    "positive": Positive(),
    "tile": Tile(),
    "sum": Sum(),
}
