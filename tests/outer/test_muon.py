# SPDX-License-Identifier: Apache-2.0
"""MuLoCo: DiLoCo over replicas that are trained by Muon and AdamW; and loops attached to several optimizers."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung import Accelerator
from farflung.base.errors import ConfigError, Unsupported
from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape
from farflung.methods import inner
from farflung.outer import OuterLoop, diloco, muon_groups, post_local_sgd
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.replicas import same, values

SHAPE = Shape(depth=2, width=8, heads=2, context=8)
EVERY, LR, OUTER_LR, OUTER_MOMENTUM = 3, 2.0**-6, 0.9, 0.8
MULOCO = diloco(EVERY, lr=OUTER_LR, momentum=OUTER_MOMENTUM)


def small_gpt():
    torch.manual_seed(7)
    return GPT(SHAPE)


def optimizers_of(model):
    hidden, others = muon_groups(model)
    return torch.optim.Muon(hidden, lr=LR, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, lr=LR)


def differentiate(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(256, (2, SHAPE.context + 1), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def muloco(group, steps=2 * EVERY, is_attached=False, recipe=MULOCO, order=1):
    """Train as the page of recipes says; return what was learnt."""
    model = small_gpt()
    optimizers = optimizers_of(model)
    with OuterLoop(model, recipe, group) as outer:
        if is_attached:
            outer.attach(*optimizers)
        for step in range(steps):
            differentiate(model, step, group.rank)
            if not is_attached:
                outer.average_gradients()
            for optimizer in optimizers[::order]:
                optimizer.step()
            if not is_attached:
                outer.step()
        assert outer.stats().steps == steps
    return values(model)


@pytest.mark.law("published-equations")
def test_muloco_is_nesterov_momentum_over_rounds_of_muon_and_adamw():
    models = [small_gpt() for _ in range(2)]
    optimizers = [optimizers_of(model) for model in models]
    anchor = {name: parameter.detach().clone() for name, parameter in small_gpt().named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in anchor.items()}
    for step in range(2 * EVERY):
        for rank, model in enumerate(models):
            differentiate(model, step, rank)
            for optimizer in optimizers[rank]:
                optimizer.step()
        if step % EVERY == EVERY - 1:
            moved = [dict(model.named_parameters()) for model in models]
            with torch.no_grad():
                for name, value in anchor.items():
                    delta = ((value - moved[0][name]) + (value - moved[1][name])) / 2
                    momentum[name] = OUTER_MOMENTUM * momentum[name] + delta
                    value -= OUTER_LR * (delta + OUTER_MOMENTUM * momentum[name])
                    for each in moved:
                        each[name].copy_(value)
    slow = {name: value + OUTER_LR * OUTER_MOMENTUM * momentum[name] for name, value in anchor.items()}
    for learnt in run_replicas(muloco, 2):
        # Muon rounds to bf16 by design, so that a last bit of an anchor may move an update by a bit of bf16. Momentum
        # 0.7 or a rate of 0.8 would move every tensor by at least 3e-3.
        torch.testing.assert_close(learnt, slow, atol=3e-4, rtol=0)


def with_accelerator():
    """Train likewise; of these optimizers AdamW has more tensors."""
    accelerator, model = Accelerator(cpu=True), small_gpt()
    model, *optimizers = accelerator.prepare(model, *optimizers_of(model))
    with accelerator.outer(model, MULOCO):
        for step in range(2 * EVERY):
            differentiate(model, step, accelerator.process_index)
            for optimizer in optimizers:
                optimizer.step()
    return values(accelerator.unwrap_model(model))


def test_an_accelerator_counts_the_steps_of_the_optimizer_with_more_tensors():
    assert same(*run_ranks(with_accelerator, 2), *run_replicas(muloco, 2))


@pytest.mark.parametrize("recipe", [MULOCO, post_local_sgd(2, 2)], ids=["diloco", "warm-up"])
def test_a_loop_attached_to_two_optimizers_counts_once_both_have_stepped(recipe):
    for order in (1, -1):
        by_hand, attached = (run_replicas(muloco, 2, 7, attaches, recipe, order) for attaches in (False, True))
        assert same(*by_hand, *attached)


def names(model, **options):
    """The names of the hidden matrices."""
    hidden = set(map(id, muon_groups(model, **options)[0]))
    return [name for name, parameter in model.named_parameters() if id(parameter) in hidden]


def test_the_matrices_of_the_blocks_are_for_muon():
    matrices = ("query_key_value", "mix", "up", "down")
    assert names(small_gpt()) == [f"blocks.{block}.{name}.weight" for block in range(2) for name in matrices]


@settings(max_examples=30)
@given(
    widths=st.lists(st.integers(1, 4), min_size=4, max_size=6),
    frozen=st.sets(st.integers(0, 9)),
    has_bias=st.booleans(),
)
def test_each_trainable_parameter_is_in_one_group_in_the_order_of_the_model(widths, frozen, has_bias):
    model = nn.Sequential(*(nn.Linear(a, b, bias=has_bias) for a, b in pairwise(widths)), nn.LayerNorm(widths[-1]))
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad = number not in frozen
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [layer.weight for layer in list(model)[:-2] if layer.weight.requires_grad]
    if matrices:
        hidden, others = muon_groups(model)
        assert list(map(id, hidden)) == list(map(id, matrices))
        assert list(map(id, others)) == [id(one) for one in trained if id(one) not in set(map(id, hidden))]
    else:
        with pytest.raises(ConfigError, match="nothing for Muon"):
            muon_groups(model)


class Tied(nn.Module):
    """An embedding that is the head too, a table of positions, and a body."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.positions = nn.Parameter(torch.zeros(8, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.experts = nn.Parameter(torch.zeros(2, 4, 4))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class HeadFirst(nn.Sequential):
    """As models of transformers, it says which module its head is."""

    def get_output_embeddings(self):
        return self[0]


ATTENTION = ["attention.in_proj_weight", "attention.out_proj.weight"]


def test_embeddings_tied_heads_and_what_are_no_matrices_are_left_to_adamw():
    assert names(Tied()) == [*ATTENTION, "body.0.weight", "body.2.weight"]
    assert names(Tied(), adamw=["attention", "body.2.weight", "head"]) == ["body.0.weight"]
    assert names(nn.Sequential(nn.EmbeddingBag(6, 4), nn.Linear(4, 4), nn.Linear(4, 2))) == ["1.weight"]
    layers = [nn.Linear(2, 2) for _ in range(4)]
    assert names(nn.Sequential(*layers)) == ["0.weight", "1.weight", "2.weight"]
    assert names(HeadFirst(*layers)) == ["1.weight", "2.weight"]
    assert names(nn.Sequential(*layers), adamw=["0"]) == ["1.weight", "2.weight"]


def test_shards_are_refused(monkeypatch):
    monkeypatch.setattr(inner, "is_sharded", lambda parameter: parameter.shape == (12, 4))
    with pytest.raises(Unsupported, match=r"whole matrices and does not know shards\. Train with AdamW, or with DDP"):
        muon_groups(Tied())
