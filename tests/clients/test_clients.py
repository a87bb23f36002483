"""Client libraries of other languages and makers, unchanged, against the real server: see `cases` and `toolchains`."""

from __future__ import annotations

import pytest

from tests.clients.cases import EXPECTED, UNIMPLEMENTED
from tests.clients.toolchains import CLIENTS

CALLS = [(client.name, case) for client in CLIENTS.values() for case in EXPECTED if case not in client.lacks]


@pytest.mark.parametrize(("client", "case"), CALLS)
def test_each_client_sees_in_each_case_what_is_expected(client, case, address, report_of):
    report = report_of(client, address)
    assert case in report, "the program did not get so far"
    seen = report[case]
    if case == "gzip" and seen["code"] == UNIMPLEMENTED:
        pytest.skip(f"the server reads no gzip: {seen['message']}")
    assert seen == EXPECTED[case]
