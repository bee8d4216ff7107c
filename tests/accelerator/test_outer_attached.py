# SPDX-License-Identifier: Apache-2.0
"""`Accelerator(outer=OuterConfig(...))`: an unchanged loop becomes one of replicas that agree now and then."""

import io
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator, OuterConfig, utils
from farflung.accelerator.session import opened_session
from farflung.base.errors import ConfigError, StateError
from farflung.comm import collectives
from farflung.methods.arguments import recipe_of
from farflung.outer.quorum import _welcome
from farflung.process.world import current_world, joined_world
from farflung.state import AcceleratorState, PartialState
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration
from tests.accelerator.conftest import on_ranks

DILOCO = OuterConfig("diloco", every=4, rounds=200)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.norm(x)).pow(2).mean()


def prepared(config=None, steps=1, samples=40, separately=False, even=True, shuffle=True, **options):
    sharing = DataLoaderConfiguration(even_batches=even)
    options |= {"gradient_accumulation_steps": steps, "dataloader_config": sharing}
    accelerator = Accelerator(cpu=True, outer=config, **options)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(samples, 3)), batch_size=2, shuffle=shuffle)
    torch.manual_seed(2)
    if separately:
        model = accelerator.prepare_model(model)
        return accelerator, model, accelerator.prepare_optimizer(optimizer), accelerator.prepare(loader)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def one_step(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch[0]))
        optimizer.step()
        optimizer.zero_grad()


def one_epoch(accelerator, model, optimizer, loader):
    for batch in loader:
        one_step(accelerator, model, optimizer, batch)


def weights(accelerator, model):
    return {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}


def alike(states):
    return all(torch.equal(states[0][name], other[name]) for other in states for name in states[0])


def differs(accelerator, model):
    return not torch.equal(*accelerator.gather(accelerator.unwrap_model(model).out.weight.detach()).split(1))


def is_equal(value):
    """Whether a tensor is the same on both ranks, by torch: the Accelerator makes up for a pass that was broken off."""
    everyone = [torch.empty_like(value) for _ in range(2)]
    torch.distributed.all_gather(everyone, value.detach())
    return torch.equal(*everyone)


def one_after_another(act, cases):
    """What `act` returns for each case, in sessions of their own."""
    outcomes = []
    for case in cases:
        outcomes.append(act(*case))
        AcceleratorState._reset_state()
    return outcomes


def some_steps(number, accelerator, model, optimizer, loader):
    """Train on the first batches, and break."""
    for count, batch in enumerate(loader, 1):
        one_step(accelerator, model, optimizer, batch)
        if count == number:
            break


# ---- the same as the explicit form


def by_setting(config, steps, separately):
    run = prepared(config, steps, separately=separately)
    for _ in range(2):
        one_epoch(*run)
    (loop,) = run[0].outer_loops
    run[1].eval()
    return weights(*run[:2]), loop.stats().rounds, loop.stats().steps


def by_context(config, steps, separately):
    accelerator, *run = prepared(None, steps)
    with accelerator.outer(run[0], recipe_of(config, 1)) as outer:
        for _ in range(2):
            one_epoch(accelerator, *run)
            outer.flush()
        stats = outer.stats()
    return weights(accelerator, run[0]), stats.rounds, stats.steps


CONFIGS = [
    (DILOCO, 1, False),
    (DILOCO, 3, True),  # ten micro-batches: the last window is short
    (OuterConfig("local_sgd", every=3), 1, False),
    (OuterConfig("streaming_diloco", every=4, fragments=2, rounds=200), 1, False),
    (OuterConfig("diloco", every=4, rounds=200, codec="int8", inner="average", anchor_on_cpu=True), 1, False),
    (OuterConfig("quadratic", every=2, alpha=0.1), 1, False),
    (OuterConfig("hierarchical", levels="2:2,4:all"), 1, False),
]


def test_a_setting_is_the_explicit_form_bit_by_bit_and_ends_with_equal_replicas():
    ours, explicit = (run_ranks(one_after_another, 2, act, CONFIGS) for act in (by_setting, by_context))
    for number, case in enumerate(CONFIGS):
        (first, *counts), (second, *_) = ours[0][number], ours[1][number]
        expected, *their_counts = explicit[0][number]
        assert alike([first, second, expected]), case
        assert counts == their_counts, case


def where_replicas_differ(config, leave_at=None):
    """Whether replicas differ after each step, after the pass, and what the loop has counted."""
    accelerator, model, optimizer, loader = prepared(config)
    apart = []
    for number, batch in enumerate(loader, 1):
        one_step(accelerator, model, optimizer, batch)
        apart.append(not is_equal(accelerator.unwrap_model(model).out.weight))
        if number == leave_at:
            break
    return apart, weights(accelerator, model), differs(accelerator, model)


@pytest.mark.parametrize(
    ("leave_at", "apart"),
    [
        (None, [True, True, True, False, True, True, True, False, True, False]),
        (10, [True, True, True, False, True, True, True, False, True, False]),  # a break on the last batch
        (6, [True, True, True, False, True, True]),
    ],
)
def test_replicas_come_together_with_the_last_batch_or_where_all_ranks_are_after_a_break(leave_at, apart):
    outcomes = run_ranks(where_replicas_differ, 2, OuterConfig("local_sgd", every=4), leave_at)
    assert [found[0] for found in outcomes] == [apart, apart]
    assert alike([found[1] for found in outcomes]) is (leave_at != 6)
    assert [found[2] for found in outcomes] == [False, False]


def doors(accelerator):
    """What all ranks call together, by name."""
    one = torch.ones(1)

    def first():
        with accelerator.main_process_first():
            pass

    return {
        "gather": lambda: accelerator.gather(one),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(one),
        "reduce": lambda: accelerator.reduce(one),
        "pad_across_processes": lambda: accelerator.pad_across_processes(one),
        "check_trigger": accelerator.check_trigger,
        "wait_for_everyone": accelerator.wait_for_everyone,
        "main_process_first": first,
        "PartialState.wait_for_everyone": PartialState().wait_for_everyone,
        "utils.gather": lambda: utils.gather(one),
        "utils.gather_object": lambda: utils.gather_object([1]),
        "utils.broadcast": lambda: utils.broadcast(one),
        "utils.broadcast_object_list": lambda: utils.broadcast_object_list([1]),
        "utils.reduce": lambda: utils.reduce(one),
        "utils.pad_across_processes": lambda: utils.pad_across_processes(one),
        "utils.wait_for_everyone": utils.wait_for_everyone,
    }


@on_ranks(2)
def test_a_pass_that_was_left_is_made_up_for_by_what_a_script_calls_and_by_no_lower_room(tmp_path):
    """There is a round in each call after a pass that was broken off, and none in a collective of a lower room."""
    accelerator, *run = prepared(OuterConfig("local_sgd", every=100))
    (loop,) = accelerator.outer_loops
    calls = {**doors(accelerator), "save_state": lambda: accelerator.save_state(tmp_path)}
    for number, (name, call) in enumerate(calls.items()):
        some_steps(1, accelerator, *run)
        collectives.wait_for_everyone(joined_world().exchange)
        assert loop.stats().rounds == number, name
        call()
        assert loop.stats().rounds == number + 1, name


@pytest.mark.law("readout-is-slow-weights")
@on_ranks(2)
def test_an_evaluation_is_of_what_is_saved_and_changes_no_training():
    """After an epoch, and in the middle of one."""
    ended = []
    for evaluates in (False, True):
        accelerator, model, optimizer, loader = prepared(DILOCO)
        for train in (one_epoch, partial(some_steps, 2)) * 2:
            train(accelerator, model, optimizer, loader)
            trained = weights(accelerator, model)
            if evaluates:
                model.eval()
                torch.save(accelerator.unwrap_model(model), io.BytesIO())
                assert alike([weights(accelerator, model), accelerator.get_state_dict(model)])
                assert not alike([weights(accelerator, model), trained])
                model.train()
        ended.append(weights(accelerator, model))
        accelerator.unwrap_model(model.eval()).load_state_dict({name: x + 1 for name, x in trained.items()})
        model.train()
        assert alike([weights(accelerator, model), {name: x + 1 for name, x in trained.items()}])
        AcceleratorState._reset_state()
    assert alike(ended)


@on_ranks(2)
def test_an_evaluation_in_which_a_flush_is_owed_is_all_of_what_is_saved():
    accelerator, model, optimizer, loader = prepared(DILOCO)
    one_epoch(accelerator, model, optimizer, loader)
    some_steps(2, accelerator, model, optimizer, loader)
    model.eval()
    seen = []
    for _ in range(2):
        seen.append(weights(accelerator, model))
        accelerator.gather_for_metrics(torch.ones(1))
    seen.append(accelerator.get_state_dict(model))
    assert alike(seen[1:])
    model.train()


# ---- one rank alone


def one_rank_alone(folder):
    accelerator, model, optimizer, loader = prepared(DILOCO)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2))
    agreed, lent = [], []
    for number, batch in enumerate(loader, 1):
        one_step(accelerator, model, optimizer, batch)
        if number in (4, 7) and accelerator.is_main_process:
            for other in evaluation:
                with torch.no_grad():
                    accelerator.unwrap_model(model)(other[0])
            accelerator.save(accelerator.get_state_dict(model), folder / "alone.pt")
            accelerator.save(accelerator.unwrap_model(model).state_dict(), folder / "mine.pt")
        if number in (4, 7):
            agreed.append(accelerator.get_state_dict(model)["out.weight"])
            with accelerator.outer_loops[0].synced():
                lent.append(weights(accelerator, model)["out.weight"])
    model.eval()
    local = weights(accelerator, model)["out.weight"]
    return agreed, lent, local, accelerator.get_state_dict(model)["out.weight"]


def test_nothing_that_one_rank_does_alone_is_waited_for_and_state_dicts_hold_what_was_agreed(tmp_path):
    (first, first_lent, *ends), (second, second_lent, *other_ends) = run_ranks(one_rank_alone, 2, tmp_path)
    for one, two, three, four in zip(first, second, first_lent, second_lent, strict=True):
        assert torch.equal(one, two)  # of the latest round, on all ranks
        assert torch.equal(one, three)
        assert torch.equal(one, four)
    assert torch.equal(first[0], first[1])  # no round in between
    assert all(torch.equal(ends[0], other) for other in (*ends, *other_ends))
    alone, mine = torch.load(tmp_path / "alone.pt"), torch.load(tmp_path / "mine.pt")
    assert torch.equal(alone["out.weight"], first[1])
    assert not torch.equal(mine["out.weight"], first[1])


def test_a_newcomer_begins_before_its_first_forward_pass_and_keeps_the_statistics_of_that():
    try:
        accelerator, model, optimizer, loader = prepared(DILOCO)
        quorum = accelerator.outer_loops[0]._quorum
        quorum.welcome = _welcome(quorum._shared_state((), None, True))
        shared = weights(accelerator, model)
        with torch.no_grad():
            accelerator.unwrap_model(model).out.bias.fill_(7.0)  # loaded after it has met the others
        (batch,) = next(iter(loader))
        loss = model(batch)
        seen = weights(accelerator, model)
        assert torch.equal(seen["out.bias"], shared["out.bias"])
        accelerator.backward(loss)
        optimizer.step()
        found = weights(accelerator, model)
        assert torch.equal(found["norm.running_mean"], seen["norm.running_mean"])
        assert (shared["norm.num_batches_tracked"], found["norm.num_batches_tracked"]) == (0, 1)
    finally:
        AcceleratorState._reset_state()


# ---- uneven ranks, skipped steps


def uneven(samples, joined):
    accelerator, model, optimizer, loader = prepared(
        OuterConfig("diloco", every=2, rounds=200), samples=samples, even=False
    )
    counts = []
    for _ in range(3):
        if joined:
            with accelerator.join_uneven_inputs([model]):
                one_epoch(accelerator, model, optimizer, loader)
        else:
            one_epoch(accelerator, model, optimizer, loader)
        counts.append(accelerator.outer_loops[0].stats().steps)
        assert not differs(accelerator, model)
    return counts, weights(accelerator, model)


@pytest.mark.parametrize(
    ("samples", "joined", "counts"),
    [
        (30, False, ([8, 16, 24], [7, 14, 21])),
        (30, True, ([8, 16, 24], [7, 14, 21])),
        (2, False, ([1, 2, 3], [0, 0, 0])),  # a rank without any batch
    ],
)
def test_ranks_with_different_numbers_of_batches_come_together(samples, joined, counts):
    outcomes = run_ranks(uneven, 2, samples, joined)
    assert tuple(found[0] for found in outcomes) == counts
    assert alike([found[1] for found in outcomes])


# ---- warm-up, weights by items


@on_ranks(2, each=([True] * 4 + [False] * 6, [True] * 4 + [False, False, True, False, False, True]))
def test_gradients_are_averaged_as_usual_through_the_warm_up_and_stay_at_home_from_then_on():
    accelerator, model, optimizer, loader = prepared(OuterConfig("post_local_sgd", warmup=4, every=3))
    averaged, equal = [], []
    for batch in loader:
        accelerator.backward(model(batch[0]))
        weight = accelerator.unwrap_model(model).out.weight
        averaged.append(is_equal(weight.grad))
        optimizer.step()
        optimizer.zero_grad()
        equal.append(is_equal(weight))
    return averaged, equal


@pytest.mark.parametrize("how", ["told", "loader"])
@on_ranks(2, each=(0.75, 0.25))
def test_replicas_weigh_by_the_items_that_backward_is_told_of_or_else_by_samples(how):
    accelerator, model, optimizer, data = prepared(OuterConfig("local_sgd", every=2, weigh_by="items"))
    found = []
    accelerator.outer_loops[0].listeners.append(lambda this: found.append(this.weights))
    accelerator.unwrap_model(model).norm.eval()  # a batch of one has no statistics
    if how == "loader":
        sizes = [[0, 1, 2], [3]] * 4  # rank 0 gets three samples a step, rank 1 one
        data = accelerator.prepare(DataLoader(TensorDataset(torch.randn(4, 3)), batch_sampler=sizes))
    for batch in data:
        told = {"num_items": 3 if accelerator.is_main_process else 1} if how == "told" else {}
        accelerator.backward(model(batch[0]), **told)
        optimizer.step()
        optimizer.zero_grad()
    return found[0]


def test_items_that_nobody_knows_of_are_asked_for():
    accelerator, model, optimizer, _ = prepared(OuterConfig("local_sgd", every=2, weigh_by="items"))
    accelerator.backward(model(torch.randn(2, 3)))
    with pytest.raises(ConfigError, match="the number of items in this step is unknown"):
        optimizer.step()


# ---- four ranks, several models, records, ends


def two_models_on_four():
    accelerator = Accelerator(cpu=True, outer=OuterConfig("diloco", every=2, rounds=200))
    torch.manual_seed(0)
    models = [Net(), Net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    loader = DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=2)
    *made, loader = accelerator.prepare(*models, *optimizers, loader)
    models, optimizers = made[:2], made[2:]
    for batch in loader:
        for turn, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for _ in range(1 + turn):  # the second one twice a batch
                accelerator.backward(model(batch[0]))
                optimizer.step()
                optimizer.zero_grad()
    return [weights(accelerator, model) for model in models], [loop.stats().steps for loop in accelerator.outer_loops]


def test_each_model_has_a_loop_of_its_own_also_on_four_ranks():
    outcomes = run_ranks(two_models_on_four, 4)
    for number in range(2):
        assert alike([found[0][number] for found in outcomes])
    assert all(found[1] == [5, 10] for found in outcomes)


def ends(how):
    accelerator, model, optimizer, loader = prepared(DILOCO)
    batches = iter(loader)  # kept, as a pass that is left is made up for anyway
    for _ in range(2 + accelerator.process_index):  # no pass that ends, and ranks that differ
        one_step(accelerator, model, optimizer, next(batches))
    loop = accelerator.outer_loops[0]
    bare = accelerator.unwrap_model(model)
    getattr(accelerator, how)()
    learnt = {name: value.clone() for name, value in bare.state_dict().items()}
    with pytest.raises(StateError, match="has ended"):
        loop.step()
    return learnt, accelerator.outer_loops


@pytest.mark.parametrize(("how", "equal"), [("end_training", True), ("free_memory", False)])
def test_the_end_of_training_brings_all_together_and_freeing_memory_sends_nothing(how, equal):
    outcomes = run_ranks(ends, 2, how)
    assert alike([learnt for learnt, _ in outcomes]) is equal
    assert all(loops == [] for _, loops in outcomes)


def loaded_later(folder):
    """How far a replica has moved by the first round, from weights that were loaded after `prepare`."""
    accelerator, model, *others = prepared(DILOCO)
    if folder is None:
        far_away(accelerator, model)
    else:
        accelerator.load_state(folder)
    assert float(accelerator.unwrap_model(model).out.weight.detach().min()) == 100
    some_steps(4, accelerator, model, *others)
    return accelerator.outer_loops[0].stats().drift_norm


def said_at_the_end(how):
    """What each rank logs at the end of a loop that was left by `break`."""
    accelerator, *run = prepared(OuterConfig("local_sgd", every=4))
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("farflung").addHandler(handler)
    some_steps(6, accelerator, *run)
    accelerator.outer_loops[0].advice = lambda by_flags: "Exchange less often."
    if how == "nothing more":
        (controller,) = opened_session().controllers
        controller.exit_report()  # what the end of the process does
    else:
        accelerator.end_training()
    return said


def test_advice_and_steps_that_were_left_out_are_said_once_by_the_main_process():
    first, second = run_ranks(said_at_the_end, 2, "nothing more")
    assert [line.split("] ")[1].split(",")[0] for line in first] == [
        "Exchange less often.",
        "The last 2 steps were not averaged with any other replica",
    ]
    assert second == []
    assert run_ranks(said_at_the_end, 2, "end_training") == [["[RANK 0] Exchange less often."], []]


def far_away(accelerator, model):
    with torch.no_grad():
        for parameter in accelerator.unwrap_model(model).parameters():
            parameter.fill_(100.0)


def saved_without_a_loop(folder):
    accelerator, model, *_ = prepared()
    far_away(accelerator, model)
    accelerator.save_state(folder)


@pytest.mark.parametrize("how", ["by hand", "from a checkpoint without outer loops"])
def test_weights_that_are_loaded_after_prepare_are_where_replicas_begin_and_not_a_way_they_went(how, tmp_path):
    folder = None if how == "by hand" else tmp_path / "saved"
    if folder is not None:
        run_ranks(saved_without_a_loop, 2, folder)
    for drift in run_ranks(loaded_later, 2, folder):
        assert 0 < drift < 2


# ---- one process, refusals


@on_ranks(2, each=(8, 16))
def test_rounds_come_after_as_many_steps_where_a_script_begins_a_pass_for_each_batch():
    accelerator, model, optimizer, loader = prepared(OuterConfig("local_sgd", every=8), samples=64)
    steps = []
    accelerator.outer_loops[0].listeners.append(lambda one: steps.append(one.step))
    for _ in range(16):
        batches = iter(loader)
        accelerator.backward(model(*next(batches)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return tuple(dict.fromkeys(steps))


def test_one_process_exchanges_nothing_and_its_outer_optimizer_works():
    accelerator, model, optimizer, loader = prepared(DILOCO)
    one_epoch(accelerator, model, optimizer, loader)
    stats = accelerator.outer_loops[0].stats()
    assert (stats.rounds, stats.bytes_sent) == (5, 0)
    ours = weights(accelerator, model)["out.weight"]
    AcceleratorState._reset_state()
    plain = prepared(None)
    one_epoch(*plain)
    assert not torch.equal(weights(*plain[:2])["out.weight"], ours)


def test_parts_that_do_not_go_together_are_refused_before_the_world_is_joined():
    with pytest.raises(ConfigError, match="so it can't be used with a delay"):
        Accelerator(cpu=True, outer=OuterConfig("eager_diloco", every=4, inner="reset"))
    assert current_world() is None


@pytest.mark.parametrize("first", ["short", "long"])
def test_a_short_loader_that_is_begun_again_beside_a_long_one_makes_no_epochs(first):
    """Each of their steps takes a batch of both, in turns; rounds come every eight steps, and not every five."""
    accelerator = Accelerator(cpu=True, outer=OuterConfig("local_sgd", every=8))
    model = nn.Linear(2, 1)
    loaders = {name: DataLoader(torch.randn(number, 2), batch_size=1) for name, number in (("long", 40), ("short", 5))}
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loaders = {name: accelerator.prepare(loader) for name, loader in loaders.items()}
    passes = {name: iter(loader) for name, loader in loaders.items()}

    def batch(name):
        if (found := next(passes[name], None)) is None:
            passes[name] = iter(loaders[name])
            found = next(passes[name])
        return found

    order = sorted(loaders, key=lambda name: name != first)
    for _ in range(40):
        accelerator.backward(sum(model(batch(name)).mean() for name in order))
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.outer_loops[0].stats().rounds <= 6  # its first pass had begun before the long one
    accelerator.end_training()
