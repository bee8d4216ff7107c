# SPDX-License-Identifier: Apache-2.0
"""Each error of ours is also the built-in error that a caller would expect."""

import pytest

from farflung.base import errors


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.StateError, RuntimeError),
        (errors.Unsupported, NotImplementedError),
        (errors.CollectiveMismatch, RuntimeError),
        (errors.RankFailure, RuntimeError),
        (errors.CheckpointError, RuntimeError),
    ],
)
def test_an_error_is_caught_as_ours_and_as_the_builtin_one(ours, builtin):
    for caught in (errors.FarflungError, builtin):
        with pytest.raises(caught, match="why"):
            raise ours("why")


def test_the_tree_in_the_docstring_names_every_error():
    found = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    assert all(one.__name__ in errors.__doc__ for one in found if isinstance(one, type))


def test_a_suggestion_comes_only_where_a_word_is_near():
    known = ["mixed_precision", "num_processes"]
    assert errors.did_you_mean("mixed_percision", known) == " Did you mean `mixed_precision`?"
    assert errors.did_you_mean("zzz", known) == ""


def test_a_long_value_is_cut_in_every_error_and_kept_in_its_arguments():
    error = errors.StateReset(f"it is {'x' * 5000}.")
    assert (len(str(error)), len(error.args[0])) == (209, 5007)
