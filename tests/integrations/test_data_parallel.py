# SPDX-License-Identifier: Apache-2.0
"""`--outer` around plain DDP scripts: the same bits as a loop by hand around the bare model, or one sentence."""

import copy
import gc
import io
import json
import re
import sys
import time
import warnings
import weakref
from contextlib import nullcontext, redirect_stderr
from types import SimpleNamespace

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from farflung import Accelerator, PartialState
from farflung.base.errors import CollectiveMismatch, ConfigError, Unsupported
from farflung.comm.ddp_hook import average_hook
from farflung.config import environ
from farflung.methods.arguments import OuterConfig, recipe_of
from farflung.outer import OuterLoop
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.utils import gather_object
from tests.accelerator.conftest import on_ranks
from tests.integrations.takeover import installed, is_the_same
from tests.outer.islands import Grid
from tests.outer.replicas import same
from tests.recipes import OPTIONS

NAMES = ("local_sgd", "streaming_diloco", "post_local_sgd")
RECIPES = {name: OuterConfig(name, **OPTIONS[name]) for name in NAMES} | {"diloco": OuterConfig("diloco", every=3)}
OVERFLOWS = 5  # a step at which rank 1's gradients are not finite


def net(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


class OneSided(nn.Linear):
    """A layer that rank 1 leaves out."""

    def forward(self, x):
        return super().forward(x) if dist.get_rank() == 0 else x


def one_sided():
    return net().append(OneSided(2, 2))


def epochs(wrapped, step, on_epoch=lambda: None):
    """Two passes as scripts make them: accumulation, clipping, a sampler with epochs."""
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data, seed=3)
    count = 0
    for epoch in range(2):
        if epoch > 0:
            on_epoch()
        sampler.set_epoch(epoch)
        for i, (x,) in enumerate(DataLoader(data, 3, sampler=sampler)):
            is_last = i % 2 == 1
            sends = is_last or not isinstance(wrapped, DistributedDataParallel)
            if step.sets_flag:
                wrapped.require_backward_grad_sync = is_last  # as some scripts do what no_sync() does
            with nullcontext() if sends or step.sets_flag or wrapped.static_graph else wrapped.no_sync():
                loss = wrapped(x).square().mean() / 2
                if count == OVERFLOWS and dist.get_rank() == 1 and step.overflows:
                    loss = loss * float("inf")
                step.backward(loss)
            if is_last:
                count += 1
                step(wrapped)


class Step:
    """Clip and step, through a loss scaler or not."""

    def __init__(self, parameters, has_scaler=False, sets_flag=False):
        self.optimizer = torch.optim.AdamW(parameters, lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
        self.overflows, self.sets_flag = has_scaler, sets_flag
        self.scaler = torch.amp.GradScaler("cpu", enabled=has_scaler, init_scale=8.0)
        self.before, self.after = (lambda: None), (lambda done: None)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def __call__(self, model):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        self.before()
        before = [one.detach().clone() for one in model.parameters()]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.after(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        self.schedule.step()
        self.optimizer.zero_grad()


def by_hand(config, make=net, stepping=None, grid=None, **options):
    """The same with a loop by hand that begins at the same point, before the first step.

    Args:
        options: of DDP, which is over the ranks of an island, if there is a grid of them; else there is no DDP.
    """
    model = wrapped = make()
    recipe, groups, loops = recipe_of(config, 1), {}, []
    if grid is not None:
        wrapped = DistributedDataParallel(model, process_group=grid.island.pg, **options)
        groups = {"group": grid.column, "island": grid.island}
        if recipe.warmup:
            everyone = dist.group.WORLD
            ranks = lambda: everyone if not loops or loops[0].is_warming else grid.island.pg  # noqa: E731
            wrapped.register_comm_hook(None, average_hook(ranks))
    step = Step(model.parameters(), **stepping or {})

    def count(done):
        loops[0].count(done)
        loops[0].sync_if_due()

    step.before = lambda: loops or loops.append(OuterLoop(model, recipe, inner=step.optimizer, **groups))
    step.after = count
    epochs(wrapped, step, on_epoch=lambda: loops[0].flush())
    loops[0].close()
    return dict(model.state_dict())


def taken_over(config, make=net, stepping=None, **options):
    takeover = installed(config)
    wrapped = DistributedDataParallel(make(), **options)
    epochs(wrapped, Step(wrapped.parameters(), **stepping or {}))
    takeover.close()
    return {name.replace("module.", "").replace("_orig_mod.", ""): one for name, one in wrapped.state_dict().items()}


@on_ranks(2, each=(True, True))
def test_auto_chooses_for_a_ddp_script_at_the_end_of_a_short_pass():
    """Two passes, of which the first is shorter than a trial."""
    takeover, drivers = installed(OuterConfig("auto")), []
    wrapped = DistributedDataParallel(net())
    step = Step(wrapped.parameters())
    step.after = lambda done: drivers.extend(one.driver for one in takeover._followed if one.driver and not drivers)
    epochs(wrapped, step)
    recipe = json.loads(drivers[0].loop.state_dict()["auto"])["recipe"]
    assert drivers[0].timetable == "a recipe is chosen after 20 steps"
    assert drivers[0].pass_steps() == drivers[0].attempts // 2
    takeover.close()
    return recipe != "auto", is_the_same((recipe, {name: one.tolist() for name, one in wrapped.state_dict().items()}))


WAYS = {
    "plain": {},
    "scaler": {"stepping": {"has_scaler": True}},
    "flag": {"stepping": {"sets_flag": True}},
    "unused": {"find_unused_parameters": True, "make": one_sided},
    "flag, unused": {"find_unused_parameters": True, "make": one_sided, "stepping": {"sets_flag": True}},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
}


def equal_to_a_loop_by_hand(way, recipe, island_size):
    grid = None
    if island_size > 1:
        grid = Grid()
        environ.export({"FARFLUNG_ISLAND_SIZE": str(island_size)})
    wanted = by_hand(RECIPES[recipe], grid=grid, **WAYS[way])
    mine = taken_over(RECIPES[recipe], **WAYS[way])
    return is_the_same({name: one.tolist() for name, one in mine.items()}), same(mine, wanted)


@pytest.mark.parametrize(
    ("way", "recipe"), [("plain", "local_sgd"), *((way, "diloco") for way in WAYS), ("plain", "streaming_diloco")]
)
@on_ranks(2, each=(True, True))
def test_a_ddp_script_ends_with_the_bits_of_a_loop_by_hand(way, recipe):
    return equal_to_a_loop_by_hand(way, recipe, 1)


@pytest.mark.parametrize(
    ("way", "recipe"),
    [
        ("plain", "post_local_sgd"),
        ("plain", "streaming_diloco"),
        ("flag, unused", "diloco"),
        *(pytest.param(way, "diloco", marks=pytest.mark.long) for way in WAYS if way != "flag, unused"),
    ],
)
@on_ranks(4, each=(True, True))
def test_within_islands_a_ddp_script_averages_as_ddp_over_their_ranks_does(way, recipe):
    return equal_to_a_loop_by_hand(way, recipe, 2)


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize(
    ("recipe", "unused", "is_compiled"),
    [("diloco", True, False), ("streaming_diloco", False, False), ("diloco", False, True)],
)
@on_ranks(2, each=(True, True))
def test_a_loop_around_ddp_is_one_around_its_model_until_it_ends(recipe, unused, is_compiled):
    """A loop around the bare model and one around DDP, neither in a block; then DDP without a loop again."""
    ends = []
    for options in (None, {"find_unused_parameters": unused}):
        model = net()
        wrapped = model if options is None else DistributedDataParallel(model, **options)
        wrapped = torch.compile(wrapped, backend="eager") if is_compiled else wrapped
        step = Step(wrapped.parameters())
        outer = OuterLoop(wrapped, recipe_of(RECIPES[recipe], 1)).attach(step.optimizer)
        epochs(wrapped, step)
        outer.close()
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    step.optimizer.zero_grad()
    wrapped(torch.full((2, 4), float(dist.get_rank() + 1))).sum().backward()
    return same(*ends) and wrapped.broadcast_buffers, is_the_same([one.grad.tolist() for one in model.parameters()])


@on_ranks(2)
def test_a_loop_around_ddp_that_can_not_work_is_refused():
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    with pytest.raises(ConfigError, match=r"averages over 1 of 2 ranks, .*island="):
        OuterLoop(DistributedDataParallel(net(), process_group=alone), "diloco")
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, average_hook(lambda: None))
    with pytest.raises(Unsupported, match="has a communication hook already"):
        OuterLoop(hooked, "diloco")


@on_ranks(2, each=True)
def test_compiled_models_are_followed():
    takeover = installed(RECIPES["diloco"])
    for wrap in (lambda one: DistributedDataParallel(torch.compile(one, backend="eager")), torch.compile):
        wrapped = wrap(net()) if wrap is not torch.compile else wrap(DistributedDataParallel(net()), backend="eager")
        epochs(wrapped, Step(wrapped.parameters()))
    takeover.close()
    return is_the_same([one.tolist() for one in wrapped.parameters()])


def adversaries(island_size):
    """Two models with optimizers of their own, one of which steps twice as often."""
    environ.export({"FARFLUNG_ISLAND_SIZE": str(island_size)})
    takeover = installed(RECIPES["diloco"])
    models = [DistributedDataParallel(net()), DistributedDataParallel(net(2))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    torch.manual_seed(dist.get_rank())
    for step in range(8):
        for which in (0, 1) if step % 2 else (0,):
            models[1](models[0](torch.randn(4, 4))).square().mean().backward()
            optimizers[which].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    attempts = [one.driver.attempts for one in takeover._followed]
    takeover.close()
    return attempts, is_the_same([one.tolist() for model in models for one in model.state_dict().values()])


@pytest.mark.parametrize("island_size", [1, 2])
def test_two_models_with_optimizers_of_their_own_have_a_loop_each(island_size):
    assert run_ranks(adversaries, 2 * island_size, island_size) == [([8, 4], True)] * 2 * island_size


def over_which_ranks():
    """DDP models over other ranks than those of an island, and over these, with weights of each rank's own."""
    grid, rank = Grid(), dist.get_rank()
    everyone = DistributedDataParallel(net())
    with pytest.raises(ConfigError, match=r"over ranks 0, 1, 2 and 3, .* is ranks [02] and [13]\. Use .*island"):
        OuterLoop(everyone, "diloco", grid.column, island=grid.island)
    within = DistributedDataParallel(net(), process_group=grid.island.pg)
    OuterLoop(within, "diloco", grid.column, island=grid.island).detach()
    environ.export({"FARFLUNG_ISLAND_SIZE": "2"})
    installed(RECIPES["diloco"])
    torch.manual_seed(rank)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    for model, options in zip(models, ({}, {"process_group": grid.island.pg}), strict=True):
        ddp = DistributedDataParallel(model, **options)
        ddp(torch.full((1, 3), float(rank))).sum().backward()
    with pytest.raises(ConfigError, match=r"over ranks \d and \d, .*process_group=island\.pg.*leave process_group out"):
        DistributedDataParallel(net(), process_group=grid.column.pg)
    return [model.weight.tolist() for model in models], [model.weight.grad.unique().item() for model in models]


def test_a_ddp_model_is_made_over_an_island_with_the_weights_of_rank_0():
    ranks = run_ranks(over_which_ranks, 4)
    assert all(weights == ranks[0][0] for weights, _ in ranks)
    assert [gradients for _, gradients in ranks] == [[0.5, 0.5]] * 2 + [[2.5, 2.5]] * 2


@on_ranks(2)
def test_one_island_has_nothing_to_average():
    environ.export({"FARFLUNG_ISLAND_SIZE": "2"})
    installed(RECIPES["diloco"])
    with pytest.raises(ConfigError, match="all 2 processes share one"):
        DistributedDataParallel(net())


@on_ranks(2, each=[("ddp", 2, 1)])
def test_the_first_rank_writes_what_a_script_trains_into_the_runs_folder(tmp_path):
    environ.export({"FARFLUNG_RUN_FOLDER": str(tmp_path)})
    takeover = installed(RECIPES["diloco"])
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    takeover.close()
    dist.barrier()
    file = tmp_path / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    trained = sum(parameter.numel() for parameter in model.parameters())
    models = [one for one in events if one["event"] == "model"]
    assert all((one["parameters"], one["bytes"]) == (trained, 4 * trained) for one in models)
    return [(one["strategy"], one["ranks"], one["island"]) for one in models]


def held_by(model):
    return {name: one.detach().clone() for name, one in model.named_parameters()}


@on_ranks(2)
def test_one_rank_alone_saves_the_agreed_weights_and_all_go_on_from_what_they_load():
    takeover = installed(RECIPES["diloco"])
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(5):
        one_step(model, optimizer)
        if step == 2:  # a round
            agreed = held_by(model.eval())
            model.train()
    live, copied = held_by(model), copy.deepcopy(model)
    if dist.get_rank() == 0:  # alone, so nothing may wait
        saved = {name: one for name, one in model.state_dict().items() if name in live}
        assert same(saved, agreed)
        assert not same(saved, live)
        assert same(held_by(model), live)
        assert same({name: copied.state_dict()[name] for name in live}, live)
    model.load_state_dict(model.state_dict())
    assert same(held_by(model), agreed)
    takeover.close()


class Turning(torch.optim.SGD):
    """An optimizer without a schedule: it has other weights for an evaluation."""

    def eval(self):
        self._scale(0.5)

    def train(self):
        self._scale(2.0)

    @torch.no_grad()
    def _scale(self, factor):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(factor)


@on_ranks(2)
def test_training_goes_on_from_what_a_script_writes_into_weights_while_it_evaluates():
    takeover = installed(RECIPES["diloco"])
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        one_step(model, optimizer)
    live = held_by(model)
    for mean in (0.5, 1.0):
        torch._foreach_mul_([one.data for one in model.parameters()], mean)
        model.eval()
        assert not same(held_by(model), live)
        if mean != 1.0:
            for name, one in model.named_parameters():
                one.data.copy_(live[name])
        model.train()
        assert same(held_by(model), live)
    for cast in (model.double, model.half):
        model.eval()
        cast()
        model.float().train()
        assert same(held_by(model), live)
    means = {name: one / 2 for name, one in live.items()}
    for values in ({name: one.clone() for name, one in means.items()}, live):  # by assignment
        for name, one in model.named_parameters():
            one.data = values[name]
        model.train(values is live)
    assert same(held_by(model), live)
    takeover.close()


@on_ranks(2)
def test_an_optimizer_with_weights_of_its_own_for_an_evaluation_turns_those_of_the_training():
    takeover = installed(RECIPES["diloco"])
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = Turning(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        one_step(model, optimizer)
    live = held_by(model)
    model.eval()
    optimizer.eval()
    assert same(held_by(model), {name: one / 2 for name, one in live.items()})
    model.train()
    optimizer.train()
    assert same(held_by(model), live)
    takeover.close()


@pytest.mark.parametrize("is_first", [True, False])
@on_ranks(2)
def test_a_script_that_gathers_by_a_partial_state_alone_has_rounds_too(is_first):
    takeover = installed(RECIPES["diloco"])
    makers = [lambda: PartialState(cpu=True), lambda: DistributedDataParallel(net())]
    made = [make() for make in (makers if is_first else reversed(makers))]
    model = made[is_first]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        torch.manual_seed(2 * step + dist.get_rank())
        one_step(model, optimizer)
        assert gather_object([step]) == [step, step]
    assert not is_the_same([one.tolist() for one in held_by(model).values()])
    takeover.close()
    assert is_the_same([one.tolist() for one in model.state_dict().values()])


@pytest.mark.parametrize("is_iterable", [False, True])
@on_ranks(2)
def test_a_script_of_accelerate_saves_equal_weights_after_an_epoch(is_iterable):
    takeover = installed(RECIPES["local_sgd"])
    theirs = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=False)
    )
    data = [torch.randn(4, generator=torch.Generator().manual_seed(k)) for k in range(44)]
    model, batches = net(), DataLoader(Numbers(data) if is_iterable else data, 2, shuffle=not is_iterable)
    model, optimizer, batches = theirs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    for epoch in range(2):
        for x in batches:
            theirs.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert is_the_same([one.tolist() for one in model.parameters()]) == (epoch == 1)  # when a round was due
        theirs.wait_for_everyone()
        assert is_the_same([one.tolist() for one in theirs.unwrap_model(model).state_dict().values()])
    takeover.close()


@on_ranks(2)
def test_a_loader_with_a_state_ends_an_epoch_too():
    takeover = installed(RECIPES["local_sgd"])
    data = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in StatefulDataLoader(data, 2, sampler=DistributedSampler(data)):
        model(x).square().mean().backward()
        optimizer.step()
    assert is_the_same([one.tolist() for one in model.parameters()])
    takeover.close()


class Numbers(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@on_ranks(2)
def test_a_model_that_an_optimizer_trains_later_has_rounds_too():
    takeover = installed(RECIPES["diloco"])
    models = [DistributedDataParallel(net(), find_unused_parameters=True)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    for step in range(7):
        torch.manual_seed(2 * step + dist.get_rank())
        for model in models:
            one_step(model, optimizer)
        if step == 2:
            models.append(DistributedDataParallel(net(), find_unused_parameters=True))
            optimizer.add_param_group({"params": models[1].parameters()})
    assert not is_the_same([one.tolist() for one in held_by(models[1]).values()])
    takeover.close()
    assert is_the_same([one.tolist() for model in models for one in model.state_dict().values()])


@on_ranks(2)
def test_models_of_earlier_folds_are_let_go_of():
    takeover, left = installed(RECIPES["diloco"]), []
    for _ in range(3):
        model = DistributedDataParallel(net(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gc.collect()
        assert [one() for one in left] == [None] * len(left)
        left.append(weakref.ref(model.module))
        for _ in range(4):
            one_step(model, optimizer)
        del model, optimizer
    takeover.close()


@on_ranks(2)
def test_values_that_are_tied_are_saved_once():
    takeover, inner = installed(RECIPES["diloco"]), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        one_step(model, optimizer)
    for options in ({}, {"keep_vars": True}, {"destination": {}}):
        state = inner.state_dict(**options)
        assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr() != inner[0].weight.data_ptr()
        assert all(one.is_leaf for one in state.values())
    takeover.close()


@on_ranks(2)
def test_a_script_that_copies_its_net_gets_its_own_weights_and_a_line_says_what_a_state_dict_has():
    takeover = installed(RECIPES["diloco"])
    model, target, later = DistributedDataParallel(net(), find_unused_parameters=True), net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        one_step(model, optimizer)
    with redirect_stderr(io.StringIO()) as printed:
        target.load_state_dict(model.module.state_dict())
        kept = model.module.state_dict()
    own = held_by(model.module)
    assert same(held_by(target), own)
    assert not same({name: kept[name] for name in own}, own)
    one_step(model, optimizer)
    later.load_state_dict(state_dict=kept)  # what was kept is what it was
    assert same(held_by(later), {name: kept[name] for name in own})
    takeover.close()
    said = printed.getvalue().count("between rounds state_dict() has the weights that all replicas last agreed on")
    assert said == (dist.get_rank() == 0)


class Trainer:
    """What is called of transformers' Trainer."""

    def __init__(self):
        self.history = []

    def log(self, logs, start_time=None):
        self.history.append(logs)


@on_ranks(2)
def test_the_log_of_a_trainer_has_the_figures_of_the_rounds_except_in_its_evaluations():
    sys.modules["transformers.trainer"] = SimpleNamespace(Trainer=Trainer)
    takeover = installed(RECIPES["diloco"])
    model, trainer = DistributedDataParallel(net()), Trainer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        one_step(model, optimizer)
        trainer.log({"eval_loss": 1.0})
        trainer.log({"step": step}, start_time=None)
    takeover.close()
    assert trainer.history[::2] == [{"eval_loss": 1.0}] * 4
    first, second, third, fourth = map(set, trainer.history[1::2])
    assert first == second == fourth == {"step"}
    assert {"step", "outer/round", "outer/bytes_sent", "outer/waiting"} < third


def step_once(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def without_ddp():
    step_once(net())


def other_parameters():
    DistributedDataParallel(net())
    step_once(nn.Linear(1, 1))


def with_a_mesh_of_its_own():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    step_once(fully_shard(net(), mesh=mesh["shard"]))


def flat(use_orig_params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and prefers GPUs
        step_once(FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=use_orig_params))


def zero():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(net())
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step()


def with_hook(*hook):
    DistributedDataParallel(net()).register_comm_hook(*hook)


def beside(library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, library, sys)
        without_ddp()


REFUSED = {
    "trains 6 parameters which no DDP model has": without_ddp,
    "trains 2 parameters which none of the 1 DDP models has": other_parameters,
    "Shard over some ranks with an Accelerator": lambda: step_once(fully_shard(net())),
    'OuterLoop(model, recipe, mesh=mesh, outer="replica")': with_a_mesh_of_its_own,
    "with NO_SHARD gradients, over all 2 ranks in each step. Use DDP in place of NO_SHARD": lambda: flat(False),
    "with NO_SHARD gradients, over all 2 ranks in each step": lambda: flat(True),
    "ZeroRedundancyOptimizer sends all parameters in each step": zero,
    "bf16_compress_hook would have nothing to compress": lambda: with_hook(None, default_hooks.bf16_compress_hook),
    "powerSGD_hook would have nothing to compress": lambda: with_hook(PowerSGDState(None), powerSGD_hook),
    "deepspeed averages gradients by itself": lambda: beside("deepspeed"),
    "megatron averages gradients by itself": lambda: beside("megatron"),
}


@on_ranks(2)
def test_what_can_not_work_is_refused_at_the_first_step():
    takeover = installed(RECIPES["diloco"])
    for words, attempt in REFUSED.items():
        with pytest.raises((ConfigError, Unsupported), match=rf"^(?=.*--outer).*{re.escape(words)}"):
            attempt()
        takeover._followed.clear()


@on_ranks(1, connect=False)
def test_one_process_has_nothing_to_average():
    installed(RECIPES["diloco"])
    with pytest.raises(ConfigError, match="this process trains alone"):
        without_ddp()


@on_ranks(1, connect=False)
def test_items_are_counted_by_an_accelerator_alone():
    installed(OuterConfig("diloco", weigh_by="items"))
    with pytest.raises(ConfigError, match="weigh_by='items' needs an Accelerator"):
        without_ddp()
    accelerator = Accelerator()  # which counts them
    model = net()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[1].step()


# ---- ranks that do not make the same steps


class Taught(nn.Module):
    """A model with a teacher in it that follows the weights that are trained."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = net(), net().requires_grad_(False)

    def forward(self, x):
        return self.student(x)

    def follow(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1


def ends_alike(takeover, script, make=net, **options):
    """Run `script(model, optimizer)` under a takeover; return whether all ranks end alike."""
    model = DistributedDataParallel(make(), **options)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    torch.manual_seed(dist.get_rank())
    script(model, optimizer)
    takeover.close()
    return is_the_same([one.tolist() for one in model.state_dict().values()])


def one_step(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 4)).square().mean() * factor
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()


def uneven_by_join(model, optimizer):
    """torch's own words for uneven inputs, and what all ranks do together after them."""
    for number in ((7, 4), (0, 5)):
        with model.join():
            trains(*number)(model, optimizer)
        dist.all_reduce(torch.ones(1))


def rank_1_skips_its_first_step(model, optimizer):
    for step in range(7):
        one_step(model, optimizer, float("nan") if step == 0 and dist.get_rank() == 1 else 1.0)


def trains(*steps):
    """A script with so many steps on each rank."""

    def script(model, optimizer):
        for _ in range(steps[dist.get_rank()]):
            one_step(model, optimizer)

    return script


def rank_1_leaves_its_epochs_early(model, optimizer):
    sampler = DistributedSampler(range(48), shuffle=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, _ in enumerate(DataLoader(range(48), 4, sampler=sampler)):
            one_step(model, optimizer)
            if number == epoch and dist.get_rank() == 1:
                break


def layers_in_turns(model, optimizer):
    """Each rank freezes other layers in each step, in an order of its own."""
    for step in range(9):
        for number, layer in enumerate(model.module):
            layer.requires_grad_((number + step + dist.get_rank()) % 3 > 0)
        one_step(model, optimizer)


def rank_0_evaluates(model, optimizer):
    """With a sampler of its own, in the middle of epochs and between them; the others go on, or wait for it."""
    train, test = DistributedSampler(range(24)), DistributedSampler(range(8), 1, 0)
    for epoch in range(2):
        train.set_epoch(epoch)
        for number, _ in enumerate(DataLoader(range(24), 2, sampler=train)):
            model.train()
            one_step(model, optimizer)
            if number == 3 and dist.get_rank() == 0:
                model.eval()
                test.set_epoch(epoch)
                with torch.no_grad():
                    for _ in DataLoader(range(8), 2, sampler=test):
                        model(torch.randn(4, 4))
        if dist.get_rank() == 0:
            test.set_epoch(epoch)
        dist.barrier()


def windows_of_other_lengths(model, optimizer):
    """Accumulation over windows that differ from rank to rank."""
    for window in ((1, 3, 2, 1), (2, 1, 1, 4))[dist.get_rank()]:
        optimizer.zero_grad()
        for number in range(window):
            with nullcontext() if number == window - 1 else model.no_sync():
                model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()


def a_teacher_follows(model, optimizer):
    for _ in range(5):
        one_step(model, optimizer)
        model.module.follow()
    assert not is_the_same(model.module.teacher[0].weight.tolist())


UNEVEN = [
    uneven_by_join,
    rank_1_skips_its_first_step,
    trains(6, 1),
    trains(6, 0),
    rank_1_leaves_its_epochs_early,
    layers_in_turns,
    rank_0_evaluates,
    windows_of_other_lengths,
    a_teacher_follows,
]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["plain", "static"])
@on_ranks(2, each=[True] * len(UNEVEN))
def test_ranks_that_make_other_steps_end_alike(options):
    takeover = installed(RECIPES["diloco"])
    nets = {a_teacher_follows: Taught}
    return [ends_alike(takeover, script, nets.get(script, net), **options) for script in UNEVEN]


@on_ranks(2)
def test_a_join_that_asks_in_each_step_is_refused():
    model = DistributedDataParallel(net())
    outer = OuterLoop(model, "diloco")
    with pytest.raises(ConfigError, match=r"join\(\) asks all .* pass\. Leave it out: .* flush\(\)"), model.join():
        model(torch.ones(2, 4))
    outer.detach()
    takeover = installed(RECIPES["diloco"])
    model = DistributedDataParallel(net())
    with pytest.raises(ConfigError, match="throw_on_early_termination asks all ranks in each step"):
        model.join(throw_on_early_termination=True)
    takeover.close()


def waiting_for_each_other():
    """Rank 1 skips a step, so rank 0 is in a round and waits for it, while it waits for rank 0 in a call of its own."""
    takeover = installed(OuterConfig("diloco", every=2))
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(4):
            dist.all_reduce(torch.ones(1))
            one_step(model, optimizer, float("nan") if step == 1 and dist.get_rank() == 1 else 1.0)
    except (CollectiveMismatch, RuntimeError) as error:
        takeover.leave(error)
        return str(error)


def test_a_round_and_a_call_of_the_script_that_wait_for_each_other_end_at_once():
    began = time.monotonic()
    first, second = run_ranks(waiting_for_each_other, 2)
    assert time.monotonic() - began < patience(30)
    assert "Ranks wait for each other, rank 0 in " in first
    assert "`optimizer.step()`), rank 1 in `all_reduce`" in first
    assert second


@on_ranks(2)
def test_the_model_in_a_compiled_one_is_saved_as_the_whole_is():
    """In the middle of a round."""
    takeover = installed(RECIPES["diloco"])
    model = DistributedDataParallel(torch.compile(net(), backend="eager"))
    torch.manual_seed(dist.get_rank())
    trains(5, 5)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = model.module._orig_mod
    saved = {f"module._orig_mod.{name}": one for name, one in inner.state_dict().items()}
    whole, live = model.state_dict(), inner[0].weight.detach().clone()
    assert same(saved, whole)
    assert not torch.equal(whole["module._orig_mod.0.weight"], live)
    inner.load_state_dict(inner.state_dict())
    assert torch.equal(inner[0].weight, whole["module._orig_mod.0.weight"])
    takeover.close()
