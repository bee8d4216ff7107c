# SPDX-License-Identifier: Apache-2.0
"""The same seeds end with the same bits over gloo and over objects, by every recipe that gathers."""

import os

import pytest
import torch

from farflung import OuterConfig
from farflung.address.schemes import transport_at
from farflung.comm.torch_group import TorchGroup
from farflung.config.recipes import RECIPES
from farflung.methods.agreement import Mean
from farflung.methods.arguments import recipe_of
from farflung.outer import OuterLoop
from farflung.testing.ranks import run_ranks
from tests.comm.test_objects import Watch
from tests.outer.replicas import train

CHOICES = {
    "diloco": {"every": 3, "codec": "int4"},
    "hierarchical": {"levels": "2:machine,4:all", "codec": "int4"},
    "post_local_sgd": {"warmup": 2, "every": 3},
    "quadratic": {"every": 3, "alpha": 0.1},
    "edit": {"every": 4, "codec": "int8"},
}


def recipe_named(name):
    """A recipe with a choice of options."""
    options = CHOICES.get(name) or {"every": 4}
    return recipe_of(OuterConfig(name, **options), 3)


NAMES = [name for name in RECIPES if not isinstance(recipe_named(name).aggregator, Mean)]


def trained(address, name):
    """Bits of the weights of a rank, trained on data of its own over gloo or over objects."""
    rank = int(os.environ["RANK"])
    group = transport_at(address).connect("ranks", rank, 3, Watch()) if address else TorchGroup()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank))
    with OuterLoop(model, recipe_named(name), group, inner=optimizer) as outer:
        for step in range(13):
            train(model, optimizer, step, rank)
            outer.step()
        # Before the end, where weights without a common anchor are averaged by a sum on the way.
        return [parameter.detach().view(torch.int32).tolist() for parameter in model.parameters()]


def everywhere(address, names):
    return [trained(f"{address}/{name}" if address else "", name) for name in names]


@pytest.mark.law("same-bits")
def test_every_recipe_that_gathers_has_the_bits_of_gloo_over_a_folder(tmp_path):
    assert {"diloco", "eager_diloco", "gossip", "noloco", "sparse_loco", "streaming_diloco"} <= set(NAMES)
    for name in NAMES:
        (tmp_path / name).mkdir()
    over_gloo, over_files = (run_ranks(everywhere, 3, place, NAMES) for place in ("", tmp_path.as_uri()))
    for name, ours, theirs in zip(NAMES, zip(*over_files, strict=True), zip(*over_gloo, strict=True), strict=True):
        assert ours == theirs, name
