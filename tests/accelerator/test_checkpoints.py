# SPDX-License-Identifier: Apache-2.0
"""A run that is interrupted and resumed is the run that was not: same samples, dropout, losses, weights, bit by bit.

A program trains with dropout, noise from each source of random numbers, a schedule and momentum, and writes a
checkpoint after each micro-batch; fresh processes then go on from each, and must see what the first one saw.
"""

import io
import itertools
import random
import tempfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from farflung import Accelerator
from farflung.base.checks import Address
from farflung.base.tree import leaves_of
from farflung.checkpoint import checkpoint
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration
from tests.accelerator.conftest import on_ranks
from tests.accelerator.program import Program, rows_of
from tests.accelerator.weight import Weight
from tests.data.test_position import Noisy, NoisyStream, Stateful
from tests.integrations.takeover import is_the_same
from tests.recipes import made


@pytest.fixture
def folder():
    """A folder in memory where there is such a thing: each checkpoint waits for the disk several times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


class Net(nn.Module):
    """Small, with everything that could go wrong: dropout, BatchNorm's buffers, tied weights, a frozen part."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(4, 1, bias=False)
        self.tied = nn.Linear(4, 1, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x):
        h = self.first(x)
        h = self.norm(torch.cat([h, h / 2]))[: len(x)]  # BatchNorm needs two rows
        return self.tied(self.frozen(self.drop(h)))


class Training(Program):
    """Training with dropout and with noise from each source of random numbers."""

    def __init__(self, kind="shuffled", dispatch=None, n=10, **settings):
        super().__init__(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch), **settings)
        data = {"stream": NoisyStream, "stateful": Stateful}.get(kind, Noisy)(n)
        sampler = SubsetRandomSampler(range(n)) if kind == "subset" else None
        (self.loader,) = self.prepare(DataLoader(data, 2, kind == "shuffled", sampler), model=Net())

    def loss(self, x):
        return super().loss(x / 10 + torch.randn(())) * (1 + random.random()) + np.random.rand()

    def see(self, batch):
        """One micro-batch; returns all that can be seen of it."""
        x = rows_of(batch)[:, :1].float()
        loss = self.step(x).item()
        return x.flatten().tolist(), loss, self.schedulers[0].get_last_lr(), self.accelerator.sync_gradients

    def epochs(self, after=lambda number: None, num_epochs=2):
        """Train on from where the counter stands; returns what each step saw, by epoch."""
        seen = []
        for epoch in range(self.loader.iteration, num_epochs):
            self.counter.epoch = epoch
            seen.append([])
            for batch in self.loader:
                seen[-1].append(self.see(batch))
                after(len(seen[-1]))
        return seen

    def weights(self):
        state = self.accelerator.unwrap_model(self.model).state_dict()
        return {name: value.tolist() for name, value in state.items()}


def resumes(folder, pick=1, **settings):
    """Compare the run in one go with those from its checkpoints, on however many ranks this is called."""
    whole = Training(**settings)
    numbers = itertools.count()
    whole_seen = whole.epochs(lambda _: whole.accelerator.save_state(folder / f"step_{next(numbers)}"))
    at_the_end = whole.digest(whole.steps)
    places = [(epoch, done) for epoch, steps in enumerate(whole_seen) for done in range(1, len(steps) + 1)]
    for number, (epoch, done) in list(enumerate(places))[::pick]:
        other = Training(**settings)
        torch.manual_seed(77), random.seed(77)
        other.accelerator.load_state(folder / f"step_{number}")
        assert other.counter.epoch == epoch
        expected = [whole_seen[epoch][done:], *whole_seen[epoch + 1 :]]
        assert other.epochs() == expected, f"from step {number}: epoch {epoch}, after {done}"
        assert other.digest(other.steps) == at_the_end, f"from step {number}"
    return len(places)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 3},
        {"kind": "stream"},
        {"kind": "stateful", "accumulate": 2},
        {"mixed_precision": "bf16", "accumulate": 2},
        {"mixed_precision": "fp16", "accumulate": 2},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_run(settings, folder):
    assert resumes(folder, **settings) == 10


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 3},
        {"dispatch": True},
        {"kind": "stream", "dispatch": True, "accumulate": 2},
        {"kind": "stream", "dispatch": False},
        {"kind": "stateful", "dispatch": True},
        {"kind": "stateful", "dispatch": False},
        {"mixed_precision": "fp16"},
    ],
    ids=str,
)
@on_ranks(2)
def test_a_resumed_run_of_two_ranks_is_the_run(settings, folder):
    resumes(folder, 2, **settings)


class Alone(Training):
    """Training under an outer loop, with the rounds of `recipe`; each rank has its own noise, so its own weights."""

    def __init__(self, recipe, **settings):
        super().__init__(n=24, **settings)
        rank = self.accelerator.process_index
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        self.recipe = recipe

    def epochs(self, after=lambda number: None, num_epochs=2):
        self.seen = []
        with self.accelerator.outer(self.model, self.recipe):
            super().epochs(after, num_epochs)
        return self.seen

    def see(self, batch):
        self.seen.append(super().see(batch))
        return self.seen[-1]


RECIPES = {
    "local_sgd": made("local_sgd", every=3),
    "diloco": made("diloco", every=4),
    "streaming": made("streaming_diloco", every=6, delay=2),
}


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("local_sgd", {"accumulate": 2}), ("diloco", {}), ("diloco", {"mixed_precision": "fp16"}), ("streaming", {})],
    ids=str,
)
@on_ranks(2, each=True, timeout_s=110)
def test_replicas_that_train_alone_go_on_where_each_of_them_stood(folder, recipe, settings):
    """The run in one go, and those from its steps: in the middle of a round, and with a round in the air."""
    whole = Alone(RECIPES[recipe], **settings)
    numbers = itertools.count()
    seen = list(whole.epochs(lambda _: whole.accelerator.save_state(folder / f"step_{next(numbers)}")))
    at_the_end = whole.digest(whole.steps)
    assert whole.optimizers[0].is_own
    for number in range(1, len(seen), 5):  # by other parts of a round each time
        other = Alone(RECIPES[recipe], **settings)
        torch.manual_seed(77), random.seed(77)
        other.accelerator.load_state(folder / f"step_{number}")
        assert other.epochs() == seen[number + 1 :], f"from step {number}"
        assert other.digest(other.steps) == at_the_end, f"from step {number}"
    inside = Alone(RECIPES[recipe], **settings)
    with inside.accelerator.outer(inside.model, inside.recipe):
        inside.accelerator.load_state(folder / "step_7")
        inside.seen = []
        Training.epochs(inside)
    assert inside.seen == seen[8:]
    assert inside.digest(inside.steps) == at_the_end
    return is_the_same(whole.weights())


# ---- another number of ranks


def gradients_of(training):
    return [None if p.grad is None else p.grad.tolist() for p in training.model.parameters()]


def agreed_of(outer):
    (part,) = outer.state_dict()["rounds"]["fragments"]
    return outer.stats().rounds, part["agreed"]


def written(folder, settings, steps, recipe):
    """Train for some steps, save, and say what the run has seen and where its outer loop stands."""
    training = Training(n=24, **settings)
    samples = []
    with training.accelerator.outer(training.model, RECIPES[recipe]) if recipe else nullcontext() as outer:
        for batch in training.loader:
            samples.append(training.see(batch)[0])
            if len(samples) == steps:
                training.accelerator.save_state(folder)
                seen = samples, training.weights(), gradients_of(training)
                return *seen, training.optimizers[0].is_unfinished, agreed_of(outer) if recipe else None


def taken_up(folder, settings):
    """Load on another number of ranks; say what is seen of the rest of the epoch and of the next, and printed."""
    training = Training(n=24, **settings)
    with redirect_stderr(io.StringIO()) as printed:
        training.accelerator.load_state(folder)
        weights, gradients = training.weights(), gradients_of(training)
        epochs = [[sample for batch in training.loader for sample in training.see(batch)[0]] for _ in range(2)]
    return epochs, weights, gradients, printed.getvalue()


def mean_of(ranks, name):
    """The mean of the weights that two ranks had."""
    one, other = (torch.tensor(weights[name]) for _, weights, *_ in ranks)
    return (one + other) / 2


def test_two_ranks_become_one_and_four_with_each_sample_once(folder):
    before = run_ranks(written, 2, folder, {"accumulate": 3}, 4, None)
    assert before[0][3], "in the middle of a window"
    first = [sample for steps, *_ in before for step in steps for sample in step]
    for size in (1, 4):
        after = run_ranks(taken_up, size, folder, {"accumulate": 3})
        rest, following = ([sample for epochs, *_ in after for sample in epochs[number]] for number in (0, 1))
        assert sorted(first + rest) == sorted(following) == [float(k) for k in range(24)]
        for _, weights, gradients, _ in after:
            assert weights["first.weight"] == before[0][1]["first.weight"]
            for gradient, *old in zip(gradients, *(one[2] for one in before), strict=True):
                if gradient is not None:
                    mean = (torch.tensor(old[0]) + torch.tensor(old[1])) / 2
                    assert torch.equal(torch.tensor(gradient), mean)


def test_replicas_are_joined_where_their_number_changes(folder):
    before = run_ranks(written, 2, folder, {}, 5, "local_sgd")
    assert before[0][1] != before[1][1]
    ((_, weights, _, said),) = run_ranks(taken_up, 1, folder, {})
    for name in ("first.weight", "norm.running_mean"):
        assert torch.equal(torch.tensor(weights[name]), mean_of(before, name))
    assert said.count("it was written by 2 processes and resumes with 1") == 1
    assert said.count("all take the mean of their weights") == 1


def taken_up_by_a_loop(folder):
    """Load on another number of ranks and open the outer loop; say where it stands, and train to the end."""
    training = Training(n=24)
    training.accelerator.load_state(folder)
    with training.accelerator.outer(training.model, RECIPES["diloco"]) as outer:
        found = agreed_of(outer)
        for batch in training.loader:
            training.see(batch)
    return *found, training.weights()


def test_replicas_are_joined_at_their_anchor_and_its_momentum_stays(folder):
    (*_, (rounds, agreed)), _ = run_ranks(written, 2, folder, {}, 5, "diloco")
    assert rounds == 1
    for size in (1, 4):
        after = run_ranks(taken_up_by_a_loop, size, folder)
        for rounds, here, weights in after:
            assert rounds == 1
            for mine, before in zip(leaves_of(here), leaves_of(agreed), strict=True):
                assert torch.equal(mine, before) if isinstance(mine, torch.Tensor) else mine == before
            assert weights == after[0][2]


@pytest.mark.parametrize("kind", ["shuffled", "subset"])
def test_one_rank_becomes_two_with_each_sample_once(folder, kind):
    ((first, *_),) = run_ranks(written, 1, folder, {"kind": kind}, 4, None)
    after = run_ranks(taken_up, 2, folder, {"kind": kind})
    rest = [sample for epochs, *_ in after for sample in epochs[0]]
    assert sorted([*itertools.chain(*first), *rest]) == [float(k) for k in range(24)]
    said = "".join(printed for *_, printed in after)
    assert said.count("it was written by 1 process and resumes with 2") == 1
    assert said.count("rank 1 is new: its random numbers begin a stream of their own") == 1


def test_new_ranks_and_a_pass_that_was_over_are_told_in_words(folder):
    run_ranks(written, 2, folder, {}, 6, None)  # all batches of a pass
    said = "".join(printed for *_, printed in run_ranks(taken_up, 4, folder, {}))
    assert said.count("ranks 2 and 3 are new: their random numbers begin streams of their own") == 1
    assert said.count("continues after the last batch of epoch 0: epoch 1 begins, or if the script reads .it") == 1


def test_a_pass_over_a_stream_that_was_over_is_followed_by_the_next_one_on_other_ranks(folder):
    settings = {"kind": "stream", "dispatch": False}
    run_ranks(written, 2, folder, settings, 6, None)
    ((epochs, *_),) = run_ranks(taken_up, 1, folder, settings)
    assert [len(epoch) for epoch in epochs] == [24, 24]


@pytest.mark.parametrize(
    ("by_hand", "lost"), [(0, None), (3, "skipped 3 batches after a resume.*Delete the `continue`")]
)
def test_a_script_that_skips_what_the_loader_has_skipped_is_warned(by_hand, lost, folder):
    accelerator, layer = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    loader, held_out = accelerator.prepare(*(DataLoader(torch.ones(9, 1)) for _ in range(2)))
    for step, _ in enumerate(zip(loader, held_out, strict=True), 1):
        if step == 3:
            accelerator.save_state(folder)
            break
    accelerator.load_state(folder)
    for _ in held_out:  # never trained on
        pass
    with pytest.warns(UserWarning, match=lost) if lost else nullcontext():
        for step, batch in enumerate(loader):
            if step >= by_hand:
                accelerator.backward(layer(batch).sum())


def test_a_loop_that_loads_a_checkpoint_continues_with_its_own_batches(folder, capsys):
    accelerator, seen = Accelerator(cpu=True), []
    loader = accelerator.prepare(DataLoader(torch.arange(6)))
    for batch in loader:
        seen += batch.tolist()
        if seen == [0, 1]:
            accelerator.save_state(folder / "back")
        elif seen == [0, 1, 2, 3]:
            accelerator.load_state(folder / "back")
            accelerator.save_state(folder / "forth")
    assert "prepared loader 0 that is under way continues where it is" in capsys.readouterr().err
    assert [batch.item() for batch in loader] == [*range(6)]
    accelerator.load_state(folder / "forth")
    assert seen + [batch.item() for batch in loader] == [*range(6), 4, 5]


def stopped(folder, size, after):
    """Read shuffled batches of a size from where a checkpoint is, if any, and leave one after so many; the samples."""
    accelerator, seen = Accelerator(cpu=True), []
    torch.manual_seed(3)
    loader = accelerator.prepare(DataLoader(torch.arange(24), batch_size=size, shuffle=True))
    if (folder / "ckpt").exists():
        accelerator.load_state(folder / "ckpt")
    for k, batch in enumerate(loader, 1):
        seen += batch.tolist()
        if k == after:
            accelerator.save_state(folder / "ckpt")
            break
    return seen


@pytest.mark.parametrize(("old", "new", "twice"), [(4, 2, 0), (2, 4, 2), (4, 6, 0), (4, 4, 0)])
def test_a_run_with_other_batches_goes_on_after_as_many_samples(folder, old, new, twice, capsys):
    first = stopped(folder, old, 3)
    rest = stopped(folder, new, None)
    assert sorted(first[: len(first) - twice] + rest) == list(range(24))
    assert ("will be seen again" in capsys.readouterr().err) == bool(twice)


def test_a_run_trains_on_after_a_load_in_inference_mode(folder):
    training = Training()
    training.epochs(num_epochs=1)
    training.accelerator.save_state(folder / "saved")
    with torch.inference_mode():
        training.accelerator.load_state(folder / "saved")
    training.epochs()


def test_a_save_in_inference_mode_leaves_later_ones_their_memory(tmp_path):
    run = Weight()
    with torch.inference_mode():
        run.accelerator.save_state(tmp_path / "first", block=False)
    run.save(2, tmp_path / "second", block=False)
    run.accelerator.end_training()
    assert Weight().load(tmp_path / "second") == 2


def test_a_numbered_checkpoint_that_is_a_link_is_followed_by_the_next_number(tmp_path):
    project = {"project_dir": str(tmp_path / "project"), "automatic_checkpoint_naming": True}
    Weight(**project).save(1)
    there = tmp_path / "project" / "checkpoints" / "checkpoint_0"
    there.rename(tmp_path / "elsewhere")
    there.symlink_to(tmp_path / "elsewhere")
    run = Weight(**project)
    assert run.load() == 1
    assert Path(run.save(2)).name == "checkpoint_1"


def test_a_folder_that_can_not_be_read_does_not_hide_checkpoints(tmp_path, monkeypatch):
    Weight().save(1, tmp_path / "checkpoint_0")
    (tmp_path / "lost+found").mkdir()
    is_checkpoint = checkpoint.is_checkpoint

    def may_not(folder):
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(folder))
        return is_checkpoint(folder)

    monkeypatch.setattr(checkpoint, "is_checkpoint", may_not)
    assert Weight().load(tmp_path) == 1


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_weights_beside_the_checkpoints_that_a_signal_saves_are_not_resumed_from(kind, tmp_path, request):
    place = tmp_path if kind == "folder" else Address(request.getfixturevalue("bucket"))
    Weight().save(2, place / "checkpoint_0")
    Weight().save(1, place)
    accelerator = Accelerator(cpu=True, save_on_signal=place)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    assert accelerator.resume()
    assert model.weight.item() == 2
