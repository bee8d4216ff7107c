# SPDX-License-Identifier: Apache-2.0
"""Trees are taken apart and put together without loss, with the types they had."""

from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from farflung.base import tree

Point = namedtuple("Point", "x y")


class Row(list):
    """A list of its own type."""


class Batch(UserDict):
    """A mapping that moves itself, as tokenizers' batches do."""

    def to(self, device):
        return Batch({key: value.to(device) for key, value in self.items()})


@dataclass
class Record:
    first: Any
    second: Any = None
    derived: Any = field(init=False, default=7)


@dataclass(frozen=True)
class Frozen:
    only: Any


@dataclass(init=False)
class Summed:
    total: Any

    def __init__(self, first: Any, second: Any) -> None:
        self.total = first + second
        self.note = "no field"


leaves = st.one_of(st.integers(), st.none(), st.text(max_size=3), st.builds(torch.tensor, st.integers(0, 9)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(Row),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Frozen, inner),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equality that looks into containers and compares types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Record, Frozen)):
        return all(same(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))
    return a == b


@settings(max_examples=60)
@given(trees)
def test_a_tree_is_rebuilt_from_its_leaves_and_a_hashable_spec_that_says_nothing_of_them(data):
    flat, spec = tree.flatten(data)
    rebuilt = tree.unflatten(spec, flat)
    assert same(rebuilt, data)
    assert getattr(rebuilt, "default_factory", None) == getattr(data, "default_factory", None)
    _, again = tree.flatten(tree.unflatten(spec, [object() for _ in flat]))
    assert (again, hash(again)) == (spec, hash(spec))
    seen = []
    result = tree.recursively_apply(lambda x: seen.append(x) or x, data, test_type=lambda x: not tree.is_container(x))
    assert same(result, data)
    assert all(a is b for a, b in zip(seen, tree.leaves_of(data), strict=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2, 3]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, {"c": 1}),
        (Point(1, 2), (1, 2)),
        ([1, [2]], [[1], 2]),
        (Record(1, 2), {"first": 1, "second": 2}),
        (defaultdict(list, a=1), defaultdict(int, a=1)),
    ],
)
def test_different_structures_have_different_specs(one, other):
    assert tree.flatten(one)[1] != tree.flatten(other)[1]


def test_mappings_of_every_kind_keep_their_type():
    x = torch.ones(2)
    for data in (UserDict(a=x), Counter(a=1), MappingProxyType({"a": x}), defaultdict(list, a=x), OrderedDict(a=x)):
        doubled = tree.recursively_apply(lambda leaf: leaf * 2, data)
        assert type(doubled) is type(data)
        assert list(doubled) == ["a"]
        flat, spec = tree.flatten(data)
        assert type(tree.unflatten(spec, flat)) is type(data)


def test_records_keep_what_their_constructors_would_not_have_made():
    counted = Record(torch.ones(2, dtype=torch.bfloat16))
    counted.derived = 9
    summed = Summed(torch.ones(2, dtype=torch.bfloat16), 1)
    counted, summed = tree.convert_to_fp32([counted, summed])
    assert (counted.derived, summed.note) == (9, "no field")
    assert counted.first.dtype == summed.total.dtype == torch.float32
    flat, spec = tree.flatten(summed)
    assert torch.equal(tree.unflatten(spec, flat).total, summed.total)


def test_recursively_apply_passes_arguments_and_names_the_operation_that_met_a_stranger():
    def scale(x, factor, shift=0):
        return x * factor + shift

    assert tree.recursively_apply(scale, [torch.ones(1), "kept"], 3, shift=1)[0].item() == 4
    with pytest.raises(TypeError, match=r"scale: found a str \('stranger'\).*gather_object"):
        tree.recursively_apply(scale, {"a": ["stranger"]}, 3, error_on_other_type=True)


def test_send_to_device_moves_all_but_the_skipped_and_uses_a_container_s_own_way():
    data = {"a": torch.ones(1), "keep": [torch.ones(1)], "deep": ({"keep": torch.ones(1), "go": torch.ones(1)}, 3)}
    moved = tree.send_to_device(data, "meta", skip_keys="keep")
    assert moved["a"].device.type == moved["deep"][0]["go"].device.type == "meta"
    assert moved["keep"] is data["keep"]
    assert moved["deep"][0]["keep"] is data["deep"][0]["keep"]
    assert moved["deep"][1] == 3
    batch = tree.send_to_device(Batch(ids=torch.ones(1)), torch.device("meta"))
    assert type(batch) is Batch
    assert batch["ids"].is_meta


def test_batch_size_and_device_are_those_of_the_first_tensor():
    data = ["text", {"scalar": torch.tensor(1.0), "x": torch.zeros(5, 2, device="meta")}, torch.zeros(7)]
    assert (tree.batch_size_of(data), tree.find_device(data)) == (5, torch.device("cpu"))
    assert (tree.batch_size_of(["text"]), tree.find_device([])) == (None, None)


def test_listify_and_fp32_treat_every_dtype():
    data = {"half": torch.tensor([1.5], dtype=torch.bfloat16), "int": torch.tensor(2), "text": "t"}
    assert tree.listify(data) == {"half": [1.5], "int": 2, "text": "t"}
    wide = tree.convert_to_fp32(data)
    assert wide["half"].dtype is torch.float32
    assert wide["int"].dtype is torch.int64
