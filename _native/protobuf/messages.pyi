"""Inference messages as Python objects, for tests and tools; the server uses codec.pxd and encoding.pxd."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# (member of inference.InferParameter's oneof, its value); ("", None) when no member is set
ParameterValue = tuple[str, bool | int | str | float | None]

PARAMETER_KINDS: tuple[str, ...]

class DecodedInput(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, ParameterValue]
    has_contents: bool
    contents_mask: int
    contents_count: int
    contents_bytes: int

class DecodedOutput(NamedTuple):
    name: str
    parameters: dict[str, ParameterValue]

class DecodedRequest(NamedTuple):
    model_name: str
    model_version: str
    id: str
    parameters: dict[str, ParameterValue]
    inputs: tuple[DecodedInput, ...]
    outputs: tuple[DecodedOutput, ...]
    raw: tuple[bytes, ...]

class Decoder:
    """A decoder with one native message that it uses again for each decode, as the server does."""

    def decode(self, data: bytes) -> DecodedRequest:
        """Decode a ModelInferRequest; ValueError when it is malformed or has too many elements."""
    def content(self) -> DecodedRequest:
        """The content after the last decode; that of an empty message if it failed."""
    def parameter(self, key: str) -> ParameterValue | None:
        """The last request parameter with this key; None: there is none."""
    def contents(self, index: int, datatype: str) -> bytes:
        """The typed contents of an input as raw tensor bytes; ValueError when they are not of this datatype."""

def decode(data: bytes) -> DecodedRequest:
    """Decode a ModelInferRequest; ValueError when it is malformed or has too many elements."""

def encode_response(
    model_name: str,
    model_version: str,
    id: str,
    parameters: Mapping[str, ParameterValue],
    outputs: Sequence[tuple[str, str, Sequence[int]]],
    raw: Iterable[bytes],
) -> bytes:
    """Encode a ModelInferResponse; `outputs` are (name, datatype, shape), `raw` the raw_output_contents."""
