# SPDX-License-Identifier: Apache-2.0
"""What Lightning and transformers' Trainer need in addition to hooks; and messages in the words of each framework."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from farflung.base.errors import ConfigError
from farflung.hosts import elastic, frameworks
from farflung.hosts.data_parallel import DDPTakeover
from farflung.methods.arguments import OuterConfig
from farflung.process.place import FIXED
from tests.accelerator.conftest import on_ranks
from tests.integrations.takeover import installed, is_the_same

DATA = TensorDataset(torch.zeros(8, 4))


@pytest.fixture(autouse=True)
def no_torchdata(monkeypatch):
    """Its loaders, whose class would stay changed after the test."""
    monkeypatch.delitem(sys.modules, "torchdata.stateful_dataloader", raising=False)


def lightning(put=sys.modules.__setitem__):
    """The parts of Lightning that are followed, put among the loaded modules."""

    class Strategy:
        def __init__(self, is_last_batch=True):
            loop = SimpleNamespace(batch_progress=SimpleNamespace(is_last_batch=is_last_batch))
            trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop))
            self.lightning_module = SimpleNamespace(trainer=trainer)

        def on_train_end(self):
            pass

        def on_validation_start(self):
            pass

    class _FitLoop:
        def on_advance_end(self):
            pass

    def sized_len(loader):
        return len(loader)

    parts = {
        "pytorch.strategies": {"Strategy": Strategy},
        "pytorch.loops": {"_FitLoop": _FitLoop},
        "fabric.utilities.data": {"sized_len": sized_len},
    }
    made = []
    for name, content in parts.items():
        made.append(ModuleType(f"lightning.{name}"))
        vars(made[-1]).update(content)
        put(made[-1].__name__, made[-1])
    return made


class CallbackHandler:
    """What is called of transformers' handler of its Trainer's callbacks."""

    def on_epoch_end(self, args, state, control, **kwargs):
        return control

    def on_train_end(self, args, state, control, **kwargs):
        return control


def ended(event):
    assert getattr(CallbackHandler(), event)(None, None, "control", more=1) == "control"


ENDS = {
    "nothing": lambda *_: None,
    "a Lightning fit": lambda strategies, _: strategies.Strategy().on_train_end(),
    "a Lightning epoch, validated": lambda strategies, _: strategies.Strategy().on_validation_start(),
    "a Lightning epoch, saved": lambda _, loops: loops._FitLoop().on_advance_end(),
    "a Lightning validation in mid-epoch": lambda strategies, _: strategies.Strategy(False).on_validation_start(),
    "a Trainer's epoch": lambda *_: ended("on_epoch_end"),
    "a Trainer's training": lambda *_: ended("on_train_end"),
}
OF_FITS = ("a Lightning fit", "a Trainer's training")
IN_MID_PASS = ("nothing", "a Lightning validation in mid-epoch")


@on_ranks(2, each={name: name not in IN_MID_PASS for name in ENDS})
def test_where_frameworks_end_a_fit_or_an_epoch_all_steps_come_together():
    """After each of the ends, reached in mid-pass, ranks have the same weights, and save what they evaluate."""
    *parts, _ = lightning()
    sys.modules["transformers.trainer_callback"] = SimpleNamespace(CallbackHandler=CallbackHandler)
    takeover = installed(OuterConfig("diloco", every=1000, report="off"))
    seen = {}
    for name, end in ENDS.items():
        takeover.forget()
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, _ in enumerate(DataLoader(DATA, 1, sampler=DistributedSampler(DATA))):
            if dist.get_rank() == 0 or number == 0:  # the other one has fewer steps
                model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean().backward()
                optimizer.step()
            if number == 2:
                break
        end(*parts)
        seen[name] = is_the_same(net.weight.tolist())
        assert torch.equal(net.state_dict()["weight"], net.weight) is (
            name in ("a Lightning fit", "a Trainer's training")
        )
        assert torch.equal(net.state_dict()["weight"], net.eval().weight)
    takeover.close()
    return seen


WORDS = {
    "lightning": 'strategy="ddp"',
    "pytorch_lightning": "Trainer",
    "ignite": "DistributedDataParallel",
    "keras": "fit does not",
}


def test_lightning_is_told_no_length_that_is_only_planned(monkeypatch):
    *_, data = lightning(lambda name, one: monkeypatch.setitem(sys.modules, name, one))
    planned, known = DistributedSampler(DATA, 1, 0), DistributedSampler(DATA, 1, 0, shuffle=False)
    loaders = [DataLoader(DATA, 2, sampler=sampler) for sampler in (planned, known)]
    training = SimpleNamespace(is_planned=lambda sampler: sampler is planned, read_ahead=set(), iterate=None)
    for _ in range(2):  # as each DDP model calls it
        frameworks.follow_frameworks(lambda **_: None, lambda: False, training)
    combined = [SimpleNamespace(flattened=[loader], __len__=None) for loader in loaders]
    assert [data.sized_len(loader) for loader in loaders] == [None, 4]
    assert data.sized_len(combined[0]) is None
    assert training.read_ahead == {planned}


EVERY_LENGTH_IS_PLANNED = SimpleNamespace(is_planned=lambda sampler: True, iterate=None)


class UnevenLoader(DataLoader):
    """The share of a replica: each pass has another number of batches, and `len()` is what is planned."""

    def __init__(self, passes):
        super().__init__(DATA, sampler=DistributedSampler(DATA, 1, 0))
        self.passes = iter(passes)

    def __iter__(self):
        return iter(range(next(self.passes)))

    def __len__(self):
        return 3


@pytest.mark.package("ignite")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what ignite calls
@pytest.mark.parametrize(
    ("epoch_length", "passes", "epochs"),
    [(None, (3, 5, 2, 0, 4), [3, 5, 2, 0, 4]), (None, (4, 4, 1), [4, 4, 1]), (2, (4, 4, 4), [2] * 5)],
)
def test_an_epoch_of_ignite_is_a_pass_and_its_end_a_flush_unless_it_is_an_evaluation(
    monkeypatch, epoch_length, passes, epochs
):
    from ignite.engine import Engine, Events

    monkeypatch.setattr(Engine, "run", Engine.run)  # put back at the end
    seen, flushes, steps = [], [], 0

    def train(engine, batch):
        nonlocal steps
        seen[-1] += 1
        steps += 1

    frameworks.follow_frameworks(lambda if_behind: flushes.append(steps), lambda: steps > 0, EVERY_LENGTH_IS_PLANNED)
    trainer, evaluator = Engine(train), Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: seen.append(0))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(range(2)) if steps else None)
    trainer.run(UnevenLoader(passes), max_epochs=len(epochs), epoch_length=epoch_length)
    assert (seen, flushes) == (epochs, [sum(epochs)])


@pytest.mark.parametrize("name", WORDS)
def test_messages_have_the_words_of_the_framework_that_a_script_has_loaded(monkeypatch, name):
    for other in WORDS:
        monkeypatch.delitem(sys.modules, other, raising=False)
    model = nn.Linear(2, 2)
    takeover = DDPTakeover(OuterConfig("diloco", every=2, report="off"))
    plain = frameworks.to_make_ddp(FIXED)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ConfigError) as raised:
        takeover._about_to_step(torch.optim.SGD(model.parameters()))
    assert frameworks.to_make_a_group() in str(raised.value)
    assert WORDS[name] in frameworks.to_make_ddp(FIXED) != plain


def test_an_epoch_of_a_trainer_that_shares_data_begins_in_train_mode(monkeypatch):
    """Its first batch is fetched then, and a pass that begins in eval mode, as after an evaluation, gets all data."""

    class Handler(CallbackHandler):
        model = nn.Linear(1, 1).eval()
        train_dataloader = SimpleNamespace(share=SimpleNamespace(is_counted=False))

        def on_epoch_begin(self, args, state, control):
            return f"{control}, {'train' if self.model.training else 'eval'}"

    place = SimpleNamespace(member="a")
    there = SimpleNamespace(board=None), {"most": 2, "expected": 2}
    monkeypatch.setattr(elastic, "_run_of", lambda here: there)
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", SimpleNamespace(CallbackHandler=Handler))
    for _ in range(2):  # Accelerators of one process
        elastic.slots_of(place, lambda *_, **options: options, None, lambda: True)
    assert Handler().on_epoch_begin(None, None, "control") == "control, train"
    assert Handler.train_dataloader.share.is_counted
    with pytest.raises(ConfigError, match=r"load_best_model_at_end=True: .* without --elastic"):
        Handler().on_epoch_begin(SimpleNamespace(load_best_model_at_end=True), None, "control")
