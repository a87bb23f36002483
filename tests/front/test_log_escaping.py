"""Log lines cannot be forged, whatever text a client has chosen."""

from __future__ import annotations

import json

import grpc
import pytest

from inferd.server.observe.escaping import escaped
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request

HIDDEN = {
    "C0": "\x00\x07\x1b[2J\r\n",
    "DEL": "\x7f",
    "C1": "\x80\x85\x9b31m\x9f",
    "separators": "\u2028\u2029",
    "bidirectional marks": "\u061c\u200e\u200f\u202a\u202e\u2066\u2069",
    "joiners": "\u200b\u200c\u200d\u2060\ufeff",
    "tags": "\U000e0041",
    "nothing": "\uffff",
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_does_not_print_is_escaped(kind):
    for character in HIDDEN[kind]:
        line = escaped(f"a{character}b")
        assert json.loads(line) == f"a{character}b"
        if not character.isprintable():
            assert character not in line
            assert line.isascii()


def test_what_prints_is_left_alone():
    for text in ("plain", "Grüße, 世界, Ελλάδα, emoji 🦊", 'quoted "x" \\ y', "", "no break: a\u00a0b"):
        assert json.loads(escaped(text)) == text
        assert not set(escaped(text)) - set(json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("door", doors.NAMES)
def test_the_name_of_a_model_in_a_refusal(door, repository):
    name = "x\u2028I1122 00:00:00.000000 1 inferd] \x9b31m\u202eevil\x7f"
    with doors.running_server(door, repository) as process:
        with grpc.insecure_channel(process.address) as channel, pytest.raises(grpc.RpcError):
            Stub(channel).ModelInfer(request(name, floats(1)))
        line = process.says("refused: NOT_FOUND")
    assert "evil" in line
    assert line.isprintable()
    assert all(each.isprintable() for each in process.lines)
