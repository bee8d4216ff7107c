# SPDX-License-Identifier: Apache-2.0
"""One is one, and two are two."""

from farflung.base.words import counted, numbered, plural, shortened


def test_numbers_and_their_nouns_agree():
    assert [counted(n, "process") for n in (0, 1, 2)] == ["0 processes", "1 process", "2 processes"]
    assert [plural(noun) for noun in ("batch", "copy", "day", "file")] == ["batches", "copies", "days", "files"]


def test_what_is_numbered_is_listed():
    told = [numbered("rank", ranks) for ranks in ([1], [1, 2], [0, 1, 2])]
    assert told == ["rank 1", "ranks 1 and 2", "ranks 0, 1 and 2"]


def test_long_words_and_lines_lose_their_middle_and_others_nothing():
    word, line = "a" * 300, "b " * 750
    for short in ("", word, f"{word} {word}", line, f"{line}\n{line}"):
        assert shortened(short) == short
    assert shortened(f"n is {'a' * 9999}; it must be 1.") == f"n is {'a' * 100}...{'a' * 99}; it must be 1."
    assert shortened(f"one\n{'b ' * 9999}b\ntwo") == f"one\n{'b ' * 250}...{' b' * 250}\ntwo"
