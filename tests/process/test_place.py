# SPDX-License-Identifier: Apache-2.0
"""The launcher's variables say which replica a process belongs to; other runs have none."""

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.process.place import FIXED, Place


def test_a_run_without_the_launchers_variables_has_fixed_replicas():
    assert Place.launched() == FIXED == Place(member=None)


@pytest.mark.parametrize("address", ["10.0.0.1:29400", "[::1]:29400"])
def test_a_replica_has_an_id_and_the_address_of_the_run(address):
    with environ.patched({"FARFLUNG_STORE": address, "FARFLUNG_MEMBER": "0"}):
        assert Place.launched() == Place(0, address)


@pytest.mark.parametrize(
    ("address", "member"), [("here", "1"), ("10.0.0.1:x", "1"), ("10.0.0.1:29400", "one"), ("a:1", "")]
)
def test_variables_that_cannot_be_understood_are_refused(address, member):
    variables = environ.patched({"FARFLUNG_STORE": address, "FARFLUNG_MEMBER": member})
    why = r"^FARFLUNG_STORE and FARFLUNG_MEMBER are .*; the launcher sets them\.$"
    with variables, pytest.raises(ConfigError, match=why):
        Place.launched()
