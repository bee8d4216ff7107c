# SPDX-License-Identifier: Apache-2.0
"""What lies behind the address of a run: a store, a folder, or a part of it, with the caller's patience and key."""

import pytest

from farflung.address.schemes import objects_at, transport_at
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError

SEAL = Seal(bytes(range(32)))


def test_what_lies_behind_an_address_has_the_patience_and_the_key_that_were_given(tmp_path):
    path = tmp_path / "a folder"
    path.mkdir()
    folder = transport_at(path.as_uri(), 7.0, SEAL)
    run = folder.of_run(b"{}")
    found = [transport_at("[::1]:80", 7.0, SEAL), folder, run, transport_at(run.address, 7.0, SEAL)]
    assert [one.address for one in found] == ["::1:80", path.as_uri(), run.address, run.address]
    assert [one.is_lasting for one in found] == [False, True, True, True]
    assert {one.board.patience_s for one in found} == {7.0}
    run.board.put("key", b"1")
    part = f"{path.as_uri()}/{run.address.partition('#')[2]}"
    with_key = [
        found[-1].board,
        transport_at(part, 7.0, SEAL).board,
        objects_at(part, SEAL),
        objects_at(f"{part}/", SEAL),
    ]
    assert [one.get("key") for one in [*with_key, objects_at(part), folder.board]] == [b"1"] * 4 + [None] * 2


@pytest.mark.parametrize("address", ["tcp://node:80", "node:80"])
def test_an_address_where_no_objects_can_lie_is_refused(address):
    with pytest.raises(ConfigError, match=f"{address} is not the address of a folder or a bucket"):
        objects_at(address)
