# SPDX-License-Identifier: Apache-2.0
"""The small GPT looks back only, knows distances rather than places, and writes the same text for the same seed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers

from farflung.demo.gpt import GPT, generate, loss_per_sequence, rotated, rotations
from farflung.demo.settings import SIZES


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT(SIZES["tiny"]).eval()


@settings(max_examples=20)
@given(place=integers(0, 31), other=integers(1, 255))
def test_a_byte_changes_nothing_before_it(model, place, other):
    tokens = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(place))
    changed = tokens.clone()
    changed[0, place] = (changed[0, place] + other) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, place:], after[:, place:], atol=1e-6)


def test_rotated_products_depend_on_distance_alone():
    torch.manual_seed(0)
    cos, sin = rotations(20, 8, torch.device("cpu"))
    query, key = torch.randn(8).expand(20, 8), torch.randn(8).expand(20, 8)
    products = rotated(query, cos, sin) @ rotated(key, cos, sin).T
    for distance in (0, 3, 7):
        line = products.diagonal(-distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))


def test_an_untrained_model_finds_all_bytes_equally_likely(model):
    tokens = torch.randint(256, (4, 32))
    assert loss_per_sequence(model(tokens), tokens).tolist() == pytest.approx([math.log(256)] * 4, abs=0.1)


def test_the_default_model_has_about_0_4_million_parameters():
    count = sum(parameter.numel() for parameter in GPT(SIZES["small"]).parameters())
    assert 350_000 < count < 450_000


def test_generated_text_has_the_length_asked_for_and_follows_the_seed(model):
    first = generate(model, b"def", 100, temperature=0.7, seed=1)  # longer than the context of 64
    assert len(first) == 100
    assert first == generate(model, b"def", 100, temperature=0.7, seed=1)
    assert first != generate(model, b"def", 100, temperature=0.7, seed=2)
