# SPDX-License-Identifier: Apache-2.0
"""Counting, joining and cutting batches of every make."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from farflung.data.batches import BatchView, concatenated, extended, plain_or_none


class Pair(NamedTuple):
    x: torch.Tensor
    names: list


def batch(start, stop):
    numbers = torch.arange(start, stop)
    return {
        "x": numbers.view(-1, 1),
        "text": [f"t{k}" for k in range(start, stop)],
        "pair": Pair(numbers, tuple(range(start, stop))),
        "ids": numbers.numpy(),
        "meta": [{"file": f"f{k}", "tags": [k, k]} for k in range(start, stop)],
        "labels": [[k] * k for k in range(start, stop)],
        "scale": torch.tensor(2.0),
        "weights": torch.ones(99),
        "kind": "train",
        "shape": (7, 7, 7, 7, 7, 7, 7),
    }


def same(one, other):
    assert one.keys() == other.keys()
    assert torch.equal(one["x"], other["x"])
    assert torch.equal(one["pair"].x, other["pair"].x)
    assert np.array_equal(one["ids"], other["ids"])
    return (
        all(one[key] == other[key] for key in ("text", "kind", "shape", "meta", "labels"))
        and one["pair"].names == other["pair"].names
    )


def test_cutting_takes_entries_of_samples_and_keeps_what_belongs_to_all_and_joining_undoes_it():
    whole = batch(0, 5)
    parts = [BatchView(whole).cut(cut) for cut in (slice(0, 2), slice(2, 3), slice(3, 5))]
    assert all(map(same, parts, (batch(0, 2), batch(2, 3), batch(3, 5))))
    assert (parts[0]["scale"], parts[0]["weights"].shape) == (2.0, (99,))
    parts = [BatchView(part) for part in parts]
    assert same(concatenated(parts).whole(), whole)
    assert concatenated(parts).length == 5


def test_the_length_is_that_of_the_first_tensor_or_of_a_list():
    assert BatchView({"a": torch.tensor(1.0), "b": torch.zeros(3, 2)}).length == 3
    assert BatchView(["a", "b"]).length == 2
    assert BatchView({"a": 1, "b": torch.tensor(2)}).length is None
    assert BatchView(["a", "b", "c"]).cut(slice(1, 3)) == ["b", "c"]


def test_batches_fit_when_only_their_lengths_differ():
    here = BatchView((torch.zeros(2, 3), ["a", "b"]))
    assert here.fits(BatchView((torch.zeros(5, 3), ["a"] * 5)))
    assert not here.fits(BatchView((torch.zeros(2, 4), ["a", "b"])))
    assert not here.fits(BatchView((torch.zeros(2, 3, dtype=torch.int), ["a", "b"])))
    assert not here.fits(BatchView([torch.zeros(2, 3), ["a", "b"]]))
    assert not here.fits(BatchView((torch.zeros(2, 3), torch.zeros(2))))


def test_missing_samples_come_from_the_source_or_else_from_the_batch():
    wide = BatchView(torch.tensor([[5, 5]]))
    longer = extended(wide, BatchView(torch.tensor([[1, 1], [2, 2]])), 3)
    assert longer.whole().tolist() == [[5, 5], [1, 1], [2, 2], [1, 1]]
    assert extended(wide, BatchView(torch.tensor([[1]])), 1).whole().tolist() == [[5, 5], [5, 5]]


def test_a_checkpoint_holds_tensors_numbers_and_texts_in_plain_containers_alone():
    plain = [{"a": (1, 2.5, True, None), 3: "text"}, b"bytes", 1j]
    assert plain_or_none([*plain, np.arange(3)])[:3] == plain
    assert plain_or_none(torch.arange(1000)[:3]).untyped_storage().nbytes() == 24
    for other in (Pair(torch.ones(1), []), {"x": object()}, np.array([object()]), np.float64(1)):
        assert plain_or_none([other]) is None
