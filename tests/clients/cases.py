"""What a client program does against the models of `tests.conformance.models`, and what it must print.

Each program takes `HOST:PORT` and prints one JSON object a line: the key "case" names the case, the other keys are what
the client library saw. A program leaves out what its library cannot do.
"""

from __future__ import annotations

_UNKNOWN = "Request for unknown model: 'nothing' is not found"

EXPECTED = {
    "ready": {"live": True, "server": True, "model": True},
    "metadata": {"server": "triton", "input": "INPUT0", "datatype": "FP32", "shape": [-1, -1]},
    "fp32": {"id": "one", "values": [1, 2.5, -3]},
    "bytes": {"values": ["", "snow \u2603", "abc"]},
    "error": {"code": 5, "message": _UNKNOWN},
    "stream": {"answers": [["first", ""], ["wrong", _UNKNOWN], ["last", ""]]},
    "gzip": {"code": 0, "message": "", "bytes": 4 * 4096},
}

UNIMPLEMENTED = 12
"""The code of a call with gzip at a server that does not read it: the case is skipped then."""
