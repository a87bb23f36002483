def decode_ns(data: bytes, loops: int) -> float:
    """Nanoseconds to decode a ModelInferRequest, the mean over `loops`; ValueError when it is malformed."""

def contents_ns(data: bytes, datatype: str, loops: int) -> float:
    """Nanoseconds to copy the typed contents of the first input; ValueError when there is none."""

def encode_ns(loops: int) -> float:
    """Nanoseconds to size and write the head of a response with one FP32 output, and its raw prefix."""
