# SPDX-License-Identifier: Apache-2.0
"""Frameworks around torch's DDP: what some need in addition to hooks of torch's, and what each calls a group or DDP."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from farflung.hosts.patching import around
from farflung.hosts.rounds import RoundFigures
from farflung.hosts.training_data import TrainingData, sampler_of
from farflung.process.place import Place

# By a module that a script has loaded: how it makes a process group, and a DDP model.
_WORDS = {
    "lightning": ('give the Trainer, or Fabric, strategy="ddp"',) * 2,
    "pytorch_lightning": ('give the Trainer strategy="ddp"',) * 2,
    "lightning_fabric": ('give Fabric strategy="ddp"',) * 2,
    "ignite": (
        "run the training in idist.Parallel(backend=...)",
        "pass the model through idist.auto_model or, under --elastic, where that makes no DDP for the one process of a "
        "replica, through torch.nn.parallel.DistributedDataParallel",
    ),
    "keras": (
        "call torch.distributed.init_process_group in the script",
        "wrap the Keras model in torch.nn.parallel.DistributedDataParallel and train it in a loop, as fit does not",
    ),
}
_TORCH = (
    "call torch.distributed.init_process_group in the script",
    "wrap their model in torch.nn.parallel.DistributedDataParallel",
)


def _words() -> tuple[str, str]:
    return next((words for name, words in _WORDS.items() if name in sys.modules), _TORCH)


def to_make_a_group() -> str:
    """Say how the script's framework makes a process group."""
    return _words()[0]


def without_group(here: Place) -> str:
    """Say what a process without a process group of several ranks must do for an outer loop that is asked for."""
    if here.member is None:
        return (
            "this process trains alone, so there are no replicas to average. Start at least two with --num_processes, "
            f"and {to_make_a_group()}."
        )
    return f"the script has made no process group in this replica: {to_make_a_group()}.{_about_own_exchange(here)}"


def _about_own_exchange(here: Place) -> str:
    """Say that a replica which comes and goes exchanges nothing with the others by itself; empty for a fixed one."""
    if here.member is None:
        return ""
    return (
        " Each replica of --elastic is a process group of its own, so what a script exchanges itself, as by "
        "dist.all_reduce, does not reach the others. Leave the exchange to --outer; or start a fixed set, with "
        "--num_processes in place of --elastic and --outer."
    )


def to_make_ddp(here: Place) -> str:
    """Say how the script's framework makes a DDP model."""
    return f"{_words()[1]}.{_about_own_exchange(here)}"


def follow_frameworks(flush: Callable[..., None], is_behind: Callable[[], bool], training: TrainingData) -> None:
    """Follow Lightning, ignite, transformers' Trainer and torchdata's loaders, if the script has loaded them.

    Args:
        flush: called where a fit ends on all ranks, with `at_end`, and where an epoch of the Trainer does, whose
            loaders have no `DistributedSampler` to tell: a collective. With `if_behind` where Lightning ends an epoch,
            or validates there: it may have left the data early, or fetches a batch ahead of data of unknown length.
        is_behind: returns whether there have been steps since the latest flush, or one is owed.
        training: knows whether a sampler's length is a plan, and its passes may end before or after it. Lightning and
            ignite would end an epoch there, in the middle of a pass, so they are not told the length.
    """

    def flushing(**how: bool) -> Callable[..., Any]:
        def act(ended: Callable[..., Any], *args: Any, **options: Any) -> Any:
            flush(**how)
            return ended(*args, **options)

        return act

    def validate(begun: Callable[..., Any], strategy: Any) -> Any:
        if strategy.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            flush(if_behind=True)
        return begun(strategy)

    end_fit, end_epoch = flushing(at_end=True), flushing(if_behind=True)  # before callbacks save

    def planned(loader: Any) -> list[DistributedSampler[Any]]:
        parts = [part for part in getattr(loader, "flattened", [loader]) if isinstance(part, DataLoader)]
        samplers = [sampler for part in parts if (sampler := sampler_of(part)) is not None]
        return [sampler for sampler in samplers if training.is_planned(sampler)]

    def length(sized_len: Callable[[object], int | None], loader: Any) -> int | None:
        if samplers := planned(loader):
            training.read_ahead.update(samplers)
            return None
        return sized_len(loader)

    def run(run: Callable[..., Any], engine: Any, data: Any = None, *args: Any, **options: Any) -> Any:
        was_behind = is_behind()  # then this may be an evaluator, perhaps of one rank, in the middle of an epoch
        with _epochs_of_passes(engine, data) if planned(data) else nullcontext():
            result = run(engine, data, *args, **options)
        if not was_behind:
            flush(if_behind=True)
        return result

    for module, owner, name, act in (
        ("lightning.pytorch.strategies", "Strategy", "on_train_end", end_fit),
        ("lightning.pytorch.strategies", "Strategy", "on_validation_start", validate),
        ("lightning.pytorch.loops", "_FitLoop", "on_advance_end", end_epoch),
        ("pytorch_lightning.strategies", "Strategy", "on_train_end", end_fit),
        ("pytorch_lightning.strategies", "Strategy", "on_validation_start", validate),
        ("pytorch_lightning.loops", "_FitLoop", "on_advance_end", end_epoch),
        ("transformers.trainer_callback", "CallbackHandler", "on_epoch_end", flushing()),
        ("transformers.trainer_callback", "CallbackHandler", "on_train_end", end_fit),
        ("lightning.fabric.utilities.data", "", "sized_len", length),
        ("lightning_fabric.utilities.data", "", "sized_len", length),
        ("ignite.engine", "Engine", "run", run),
        ("torchdata.stateful_dataloader", "StatefulDataLoader", "__iter__", training.iterate),  # which is its own
    ):
        there: Any = sys.modules.get(module)
        there = getattr(there, owner) if there is not None and owner else there
        if there is not None and not hasattr(getattr(there, name), "__wrapped__"):
            around(there, name, act)


@contextmanager
def _epochs_of_passes(engine: Any, data: Any) -> Iterator[None]:
    """Make each epoch of an ignite engine a pass over its data, however many batches that has."""
    planned, is_pass = len(data), True

    def begin() -> None:
        nonlocal is_pass
        is_pass = engine.state.epoch_length in (None, planned)  # the script has asked for no other length
        if is_pass:
            engine.state.epoch_length = None
            if engine.state.epoch > 1:
                engine.set_data(data)  # ignite continues with the iterator of the epoch before, which has ended

    def end() -> None:
        if is_pass:
            engine.state.epoch_length = None  # it was this epoch's; ignite would count later ones by it

    events = sys.modules["ignite.engine"].Events
    with engine.add_event_handler(events.EPOCH_STARTED, begin), engine.add_event_handler(events.EPOCH_COMPLETED, end):
        yield


def show_in_trainer(figures: RoundFigures) -> None:
    """Add the figures of rounds to what transformers' Trainer logs, if the script has loaded it."""

    def log(log: Callable[..., Any], trainer: Any, logs: Any, *args: Any, **options: Any) -> Any:
        if "eval_loss" not in logs:  # transformers' model card fails if evaluations have different names
            logs.update(figures.take())
        return log(trainer, logs, *args, **options)

    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None:
        around(trainer, "log", log)
