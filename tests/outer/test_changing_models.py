# SPDX-License-Identifier: Apache-2.0
"""A model that changes while its loop is open: what is new takes part from the next round on, on all ranks alike."""

import copy
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from farflung.base.errors import CollectiveMismatch, StateError
from farflung.methods.recipes import diloco, eager_diloco, hierarchical, local_sgd, post_local_sgd, streaming_diloco
from farflung.outer import Every, Identity, OuterLoop, by_bytes
from farflung.testing.sim import run_replicas
from tests.outer.replicas import on_replicas, same, shift, values
from tests.recipes import RECIPES

PLAIN = [local_sgd(1), diloco(1, lr=1.0, momentum=0.0)]
either = pytest.mark.parametrize("recipe", PLAIN, ids=["local_sgd", "diloco"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.last.weight
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)


class Low(nn.Module):
    """A low-rank adapter around a frozen layer."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, 4), float(rank)))
        self.up = nn.Parameter(torch.zeros(4, 2))


class Shifted(nn.Module):
    def forward(self, x):
        return x + 1

    def right_inverse(self, x):
        return x - 1


def normed(model, rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.first)


CHANGES = {
    "replaced": lambda model, rank: model.register_module("last", nn.Linear(4, 4)),
    "widened": lambda model, rank: model.register_module("last", nn.Linear(4, 7)),
    "appended": lambda model, rank: model.register_module("head", nn.Linear(4, 2)),
    "adapted": lambda model, rank: model.register_module("first", Low(model.first, rank)),
    "untied": lambda model, rank: setattr(model.tied, "weight", nn.Parameter(model.last.weight.detach() + rank)),
    "tied": lambda model, rank: model.norm.register_parameter("bias", model.norm.weight),
    "thawed": lambda model, rank: model.frozen.requires_grad_(True),
    "frozen": lambda model, rank: model.last.requires_grad_(False),
    "pruned": lambda model, rank: prune.l1_unstructured(model.first, "weight", amount=0.5),
    "normed": normed,
    "parametrized": lambda model, rank: parametrize.register_parametrization(model.first, "weight", Shifted()),
    "without_bias": lambda model, rank: model.last.register_parameter("bias", None),
    "doubled": lambda model, rank: model.double(),
    "halved": lambda model, rank: model.bfloat16(),
    "assigned": lambda model, rank: model.load_state_dict(values(model), assign=True),
}
appended = CHANGES["appended"]


def move(model, rank):
    """A step that differs between ranks."""
    shift([parameter for parameter in model.parameters() if parameter.requires_grad], rank + 1)


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def changed_between_rounds(group, recipe, change):
    model = Net()
    with OuterLoop(model, recipe, group) as outer:
        move(model, group.rank)
        outer.step()
        change(model, group.rank)
        move(model, group.rank)
        before = trained(model)
        outer.step()
        after = trained(model)
        move(model, group.rank)
        outer.step()
    return before, after, trained(model), outer.stats().dropped_rounds


@pytest.mark.parametrize("change", CHANGES)
@either
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_that_is_trained_after_a_change_is_averaged_in_the_next_round(recipe, change, size):
    outcomes = run_replicas(changed_between_rounds, size, recipe, CHANGES[change])
    befores, afters, ends, dropped = zip(*outcomes, strict=True)
    assert set(dropped) == {0}
    assert same(*afters)
    assert same(*ends)
    for name, after in afters[0].items():
        mean = torch.stack([before[name].double() for before in befores]).mean(0)
        bound = 2e-2 if after.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(after.double(), mean, rtol=bound, atol=bound)


def changed_under_any(group, recipe, change):
    model = Net()
    outer = OuterLoop(model, recipe, group)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer.attach(inner)
    for step in range(12):
        if step == 5:
            change(model, group.rank)
            known = {id(parameter) for each in inner.param_groups for parameter in each["params"]}
            inner.add_param_group({"params": [p for p in model.parameters() if id(p) not in known]})
        move(model, group.rank)
        model.zero_grad()
        inner.step()
    outer.close()
    return trained(model), outer.stats().dropped_rounds


@pytest.mark.long
@pytest.mark.parametrize("change", ["replaced", "appended", "thawed", "doubled", "without_bias"])
@pytest.mark.parametrize("name", RECIPES)
def test_replicas_end_alike_under_every_recipe(name, change):
    recipe = RECIPES[name]
    if recipe.schedule.fragments > 1:
        recipe = replace(recipe, fragments=by_bytes)
    outcomes = run_replicas(changed_under_any, 4, recipe, CHANGES[change])
    assert {dropped for _, dropped in outcomes} == {0}
    assert same(*(end for end, _ in outcomes))


@contextmanager
def detached(model, recipe, group):
    """A loop that is detached at the end, and a list with the mismatch that it found."""
    outer, told = OuterLoop(model, recipe, group), []
    try:
        yield outer, told
    except CollectiveMismatch as error:
        told.append(str(error))
    finally:
        outer.detach()


def changed_on(group, recipe, change, ranks=(1,), steps=2):
    """Change the model of some ranks after a round; return the mismatch that each finds."""
    model = Net()
    with detached(model, recipe, group) as (outer, told):
        for step in range(steps):
            move(model, group.rank)
            outer.step()
            if step == 0 and group.rank in ranks:
                change(model, group.rank)
    return "".join(told)


NAMED = {
    "appended": "head.weight float32 [2, 4]",
    "widened": "last.weight float32 [7, 4]",
    "adapted": "first.down float32 [2, 4]",
    "untied": "tied.weight float32 [4, 4]",
    "without_bias": "last.bias float32 [4]",
    "doubled": "first.weight float64 [4, 3]",
}


@pytest.mark.parametrize("change", NAMED)
@pytest.mark.parametrize(
    "recipe",
    [*PLAIN, replace(RECIPES["sparse_loco"], schedule=Every(1)), hierarchical({1: 2, 3: None})],
    ids=["local_sgd", "diloco", "sparse_loco", "hierarchical"],
)
def test_a_change_on_one_rank_alone_is_named_on_all(recipe, change):
    said = run_replicas(changed_on, 4 if recipe.levels else 2, recipe, CHANGES[change])
    told = [text for text in said if NAMED[change] in text]
    assert len(told) >= 2
    assert all("alone: " in text for text in told)
    assert recipe.levels or len(set(said)) == 1


def test_a_change_in_one_block_of_a_hierarchy_is_named_where_the_blocks_meet():
    (said,) = set(run_replicas(changed_on, 4, hierarchical({1: 2, 3: None}), appended, (0, 1), 3))
    assert "on ranks 0 and 1 alone: head.weight float32 [2, 4]" in said


def test_a_layer_replaced_by_its_like_on_one_rank_alone_is_refused_where_there_is_an_anchor_for_it():
    def replace_first(model, rank):
        model.first = nn.Linear(3, 4)

    averaged, anchored = (run_replicas(changed_on, 2, recipe, replace_first) for recipe in PLAIN)
    assert averaged == ["", ""]
    assert all("first.weight" in text for text in anchored)


def anchored_with_momentum(group, maker, change):
    """What becomes of the others when one layer is replaced: their anchor and momentum go on."""
    model, seen = Net(), {}
    outer = OuterLoop(model, maker(1, lr=0.5, momentum=0.5, codec=Identity()), group)
    for step in range(6):
        if step == 2 and change:
            model.last = nn.Linear(4, 4)
        shift([model.first.weight], (group.rank + 1) * 2.0**-4)
        outer.count(done=step != 1 or group.rank == 0)
        outer.sync_if_due()
        seen[str(step)] = model.first.weight.detach().clone()
    outer.detach()
    return seen


@pytest.mark.parametrize("maker", [diloco, eager_diloco])
def test_anchor_and_momentum_of_what_has_not_changed_go_on(maker):
    plain, changed = (run_replicas(anchored_with_momentum, 2, maker, change) for change in (False, True))
    assert maker is eager_diloco or same(*plain)
    assert all(map(same, plain, changed))


@on_replicas(2)
def test_the_anchor_of_a_new_parameter_begins_at_the_mean_of_all_ranks(group):
    model = Net()
    outer = OuterLoop(model, diloco(1, lr=0.5, momentum=0.5), group)
    outer.step()
    model.head = nn.Linear(1, 1)
    model.head.weight.data.fill_(group.rank)
    outer.step()
    assert model.head.weight.item() == 0.5
    shift([model.head.weight], 1)
    outer.step()
    assert model.head.weight.item() == 1.25  # 0.5 + 0.5 * (1 + 0.5 * 1), Nesterov's step with a fresh momentum
    outer.detach()


def replaced_under_way(group):
    """A layer is replaced while both fragments are under way, on rank 1 behind the other's steps."""
    model = Net()
    with OuterLoop(model, streaming_diloco(6, 2, delay=5), group) as outer:
        for step in range(26):
            if step == 7:
                model.last = nn.Linear(4, 4)
            if group.rank:
                time.sleep(1e-3)
            shift([model.first.weight], (group.rank + 1) * 2.0**-4)
            outer.step()
    return values(model)


def test_a_model_may_change_while_several_fragments_are_under_way():
    assert same(*run_replicas(replaced_under_way, 2))


@either
@on_replicas(2)
def test_after_double_no_round_rounds_to_single_precision(group, recipe):
    model = nn.Linear(1, 1, bias=False)
    with OuterLoop(model, recipe, group) as outer:
        model.double()
        model.weight.data.fill_(1 + 2.0**-40)
        outer.step()
        assert model.weight.item() == 1 + 2.0**-40


@either
@on_replicas(2)
def test_a_state_saved_after_a_change_is_that_of_the_changed_model(group, recipe):
    model, again = Net(), Net()
    outer = OuterLoop(model, recipe, group)
    outer.step()
    appended(model, group.rank)
    with pytest.raises(StateError, match=r"\(new: \['head\.weight'.* Save after the next round, or call flush"):
        outer.state_dict()
    move(model, group.rank)
    outer.step()
    state = copy.deepcopy(outer.state_dict())
    appended(again, group.rank)
    resumed = OuterLoop(again, recipe, group)
    resumed.load_state_dict(state)
    for net, loop in ((model, outer), (again, resumed)):
        move(net, group.rank)
        loop.step()
        loop.detach()
    assert same(values(model), values(again))


def lent_after_a_change(group, recipe):
    model = Net()
    outer = OuterLoop(model, recipe, group)
    outer.step()
    model.last.bias = None
    appended(model, group.rank)
    move(model, group.rank)
    mine = values(model)
    with outer.synced():
        lent = values(model.first)
    assert same(mine, values(model))
    outer.detach()
    return lent


@either
def test_weights_can_be_lent_between_a_change_and_the_next_round(recipe):
    assert same(*run_replicas(lent_after_a_change, 2, recipe))


def warmed(group, change):
    model = Net()
    with detached(model, post_local_sgd(4, 1), group) as (outer, told):
        inner = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (model.first, model.last)]
        outer.attach(*inner)
        if change == "appended" and group.rank:
            appended(model, group.rank)
        inner[group.rank if change == "order" else 0].step()
    return "".join(told)


def test_ranks_that_train_different_values_or_in_different_orders_in_a_warm_up_are_told():
    assert run_replicas(warmed, 2, "") == ["", ""]
    for change, numels, steps in ("appended", "[44, 54]", "[0]"), ("order", "[44, 44]", "[0, 1]"):
        says = f"these have {numels} trainable values, and step optimizers {steps}. Change the model and step its"
        assert all(says in said for said in run_replicas(warmed, 2, change))
