# SPDX-License-Identifier: Apache-2.0
"""Nested tensors are cut and joined leaf by leaf."""

import pytest
import torch

from farflung.utils import concatenate, slice_tensors


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
