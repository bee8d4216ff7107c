# SPDX-License-Identifier: Apache-2.0
"""Nested tensors are cut and joined leaf by leaf."""

import pytest
import torch

from farflung.utils import concatenate, pad_input_tensors, slice_tensors


def test_concatenate_joins_leaf_by_leaf():
    parts = [{"x": torch.full((n, 2), n), "y": (torch.full((n,), -n),)} for n in (1, 3)]
    joined = concatenate(parts)
    assert joined["x"].tolist() == [[1, 1]] + 3 * [[3, 3]]
    assert joined["y"][0].tolist() == [-1, -3, -3, -3]
    with pytest.raises(TypeError, match="'first'; it must be a tensor"):
        concatenate([{"note": "first"}, {"note": "second"}])
    assert concatenate(["alone"]) == "alone"
    assert concatenate([torch.zeros(2, 1), torch.zeros(2, 2)], dim=1).shape == (2, 3)
    with pytest.raises(TypeError, match="structures differ"):
        concatenate([{"x": torch.ones(1)}, {"z": torch.ones(1)}])


def test_slice_tensors_cuts_the_first_dimension():
    cut = slice_tensors([torch.arange(6), {"a": torch.arange(12).view(6, 2)}], slice(1, 3))
    assert cut[0].tolist() == [1, 2]
    assert cut[1]["a"].tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("size", "ranks", "padded"), [(1, 2, 2), (3, 2, 4), (4, 3, 6), (2, 6, 6), (61, 6, 66), (8, 2, 8)]
)
def test_the_last_sample_is_repeated_until_all_ranks_get_equally_many(size, ranks, padded):
    batch = {"x": torch.arange(size * 3.0).reshape(size, 3)}
    found = pad_input_tensors(batch, size, ranks)["x"]
    assert torch.equal(found, torch.cat([batch["x"], batch["x"][-1:].expand(padded - size, 3)]))
    assert torch.equal(pad_input_tensors(batch["x"].T, size, ranks, dim=1), found.T)
