# SPDX-License-Identifier: Apache-2.0
"""One is one, and two are two."""

from farflung.base.words import counted, numbered, plural


def test_numbers_and_their_nouns_agree():
    assert [counted(n, "process") for n in (0, 1, 2)] == ["0 processes", "1 process", "2 processes"]
    assert [plural(noun) for noun in ("batch", "copy", "day", "file")] == ["batches", "copies", "days", "files"]


def test_what_is_numbered_is_listed():
    assert [numbered("rank", ranks) for ranks in ([1], [1, 2], [0, 1, 2])] == [
        "rank 1",
        "ranks 1 and 2",
        "ranks 0, 1 and 2",
    ]
