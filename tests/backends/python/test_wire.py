"""The wire is written down twice, in Python for the worker and in C for the server: both say the same."""

import re
import struct
from pathlib import Path

from inferd.backends.python.worker import protocol

PXD = Path(protocol.__file__).parent.parent / "_wire.pxd"
TEXT = PXD.read_text()
CODES = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "uint64_t": "Q"}

STRUCTS = {
    "Head": protocol.HEAD,
    "ExecuteHead": protocol.EXECUTE_HEAD,
    "RequestRecord": protocol.REQUEST,
    "ExtraRecord": protocol.EXTRA,
    "TensorRecord": protocol.TENSOR,
    "ResponseRecord": protocol.RESPONSE_HEAD,
    "BlsRecord": protocol.BLS_HEAD,
    "CudaMemory": protocol.CUDA_MEMORY,
    "RegionMemory": protocol.REGION_MEMORY,
    "StatisticsRecord": protocol.STATISTICS_RECORD,
}
NAMES = {
    "WIRE_VERSION": "VERSION",
    "TRUE_FLAG": "TRUE",
    "PLACE_INLINE": "INLINE",
    "PLACE_ARENA": "ARENA",
    "PLACE_CUDA": "CUDA",
    "PLACE_REGION": "REGION",
    "PLACE_INPUT": "INPUT",
    "RESPONSE_OK": "STATUS_OK",
    "RESPONSE_ERROR": "STATUS_ERROR",
    "RESPONSE_OPEN": "STATUS_OPEN",
    "RESPONSE_RESCHEDULE": "STATUS_RESCHEDULE",
    "WIRE_SEQUENCE_START": "SEQUENCE_START",
    "WIRE_SEQUENCE_END": "SEQUENCE_END",
}


def test_constants_have_the_same_value_in_both():
    found = re.findall(r"^    (\w+) = (.+?)$", TEXT, re.MULTILINE)
    assert len(found) > 50
    for name, value in found:
        expected = getattr(protocol, NAMES.get(name, name))
        assert eval(value, vars(protocol).copy()) == expected, name


ELSEWHERE = ("PARAMETER_", "REPORTED_", "LOG_", "CODE_UNKNOWN")
"""Prefixes of constants that C has from elsewhere, or does not look at."""


def test_no_constant_is_missing_in_c():
    found = {NAMES.get(name, name) for name, _ in re.findall(r"^    (\w+) = (.+?)$", TEXT, re.MULTILINE)}
    for name, value in vars(protocol).items():
        if isinstance(value, int) and name.isupper() and not name.startswith(ELSEWHERE):
            assert name in found, name


def test_every_kind_of_packet_has_a_number_of_its_own():
    kinds = re.search(r"cdef enum Kind:\n((?:    .*\n)+)", TEXT)[1]
    numbers = re.findall(r"= (\d+)", kinds)
    assert len(set(numbers)) == len(numbers)


def test_structures_have_the_same_fields_in_both_and_no_padding():
    for name, expected in STRUCTS.items():
        body = re.search(rf"cdef struct {name}:\n((?:    .*\n)+)", TEXT)[1]
        fields = re.findall(r"^    (\w+) \w+(?:\[(\d+)\])?", body, re.MULTILINE)
        codes = "".join(f"{count}s" if count else CODES[kind] for kind, count in fields)
        assert f"<{codes}" == expected.format, name
        assert struct.calcsize(f"@{codes}") == expected.size, f"{name} has padding"
        assert expected.size % 8 == 0
