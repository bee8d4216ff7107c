# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of batches, under DDP: those that finish early answer the others' collectives.

torch's `Join` does that for DDP's own collectives. The sums of `backward(num_items=)` and the agreement on accumulation
windows use a group of their own, where a rank without data answers with zeros, from a thread: so it need not know which
of these collectives the others make, and when.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from farflung.base.causes import cause_of
from farflung.base.checks import check_type
from farflung.base.errors import ConfigError, RankFailure
from farflung.base.forward import Forward
from farflung.base.tree import send_to_device
from farflung.comm import collectives
from farflung.comm.shards import model_has_dtensor
from farflung.comm.torch_group import TorchGroup
from farflung.data.loader import PreparedLoader
from farflung.data.samplers import BatchSamplerShard
from farflung.loop.state import LoopState
from farflung.loop.uneven import JoinedRanks
from farflung.process.world import World
from farflung.resume.run import Run


@contextmanager
def join_uneven_inputs(
    joinables: list[Any], even_batches: bool | None, run: Run, has_outer: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Hold torch's `Join` over `joinables`, with `even_batches` overridden on the loaders that have it.

    Args:
        joinables: models. Those under DDP are joined; a warning names others, whose ranks need nothing of each other.
        has_outer: whether a model has an outer loop, whose ranks stay in the rounds when they have no more data.

    Raises:
        ConfigError: one of `joinables` is sharded.
        RankFailure: another rank left the block by an exception, or died.
    """
    check_type("join_uneven_inputs: joinables", joinables, (list, tuple), "a list of prepared models, such as [model]")
    for joinable in joinables:
        check_type("join_uneven_inputs: each of joinables", joinable, nn.Module, "a prepared model")
    if run.world.size == 1:
        yield
        return
    if run.loop.stepped_in is not None:  # between two epochs, as there are no boundaries inside
        run.loop.boundary()
    models = [run.resolve(joinable) for joinable in joinables]
    for model in models:
        name = type(model).__name__
        if model_has_dtensor(model):
            raise ConfigError(
                f"join_uneven_inputs: a {name} is sharded, and sharded models can't be joined: give their loaders "
                "even_batches=True."
            )
        if not isinstance(model, Joinable):
            warnings.warn(f"join_uneven_inputs: a {name} is not wrapped in DDP, so it is not joined.", stacklevel=4)
    with ExitStack() as stack:
        if even_batches is not None:
            for loader in run.loaders:
                _override(loader, even_batches, stack)
        joinables = [model for model in models if not has_outer(model) and isinstance(model, Joinable)]
        if not joinables:
            yield
            return
        ranks = stack.enter_context(_joined(run.world, run.loop))
        probe = _JoinProbe(joinables)
        with Join([*joinables, probe]):
            yield
            ranks.respond()
        Join(joinables, enable=False)  # else the models would keep asking who has joined before each forward pass
        _catch_up(probe, run)


@contextmanager
def _joined(world: World, loop: LoopState) -> Iterator[JoinedRanks]:
    """Make `loop` agree with the other ranks. All enter; none waits for a rank that leaves by an exception."""
    everyone = world.group
    assert isinstance(everyone, TorchGroup)
    group = TorchGroup(dist.new_group(backend="gloo"), everyone.shared, in_background=True)
    group.await_connections()
    before, loop.joined = loop.joined, JoinedRanks(group, everyone)
    ranks = loop.joined
    try:
        yield ranks
    except BaseException as error:
        cause = _explained(error, everyone)
        everyone.leave(f"{type(cause).__name__}: {cause}"[:500], cause=cause_of(cause))
        group.abort()
        if cause is not error:
            raise cause from error
        raise
    finally:
        ranks.wait()
        loop.joined = before
        dist.destroy_process_group(group.pg)


def _explained(error: BaseException, group: TorchGroup) -> BaseException:
    """Return an error that names the rank that left, if one did and torch reports a closed connection."""
    if isinstance(error, RuntimeError) and not isinstance(error, RankFailure):
        try:
            group.raise_if_broken()
        except RankFailure as known:
            return known
    return error


class _JoinProbe(Joinable, JoinHook):
    """Learns whether this rank was among those that trained longest."""

    def __init__(self, models: list[Any]) -> None:
        super().__init__()
        self.models = models
        self.came_last = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    def post_hook(self, is_last_joiner: bool) -> None:
        self.came_last = is_last_joiner

    join_device = Forward[Any](lambda self: self.models[0].join_device)
    join_process_group = Forward[Any](lambda self: self.models[0].join_process_group)


def _catch_up(probe: _JoinProbe, run: Run) -> None:
    """Give the ranks that took fewer steps the state of the others' optimizers, schedulers and loss scale.

    torch's `Join` gives them the weights only: replicas would continue with different moments and learning rates.
    """
    last = collectives.gather_object(run.world.exchange, [probe.came_last], name="join_uneven_inputs")
    if all(last):
        return
    parameters = [parameter for model in probe.models for parameter in model.parameters()]
    optimizers = [optimizer for optimizer in run.optimizers if optimizer.owns(parameters)]
    schedulers = [
        scheduler for scheduler in run.schedulers if any(other in optimizers for other in scheduler.optimizers)
    ]
    keepers: list[Any] = [*optimizers, *schedulers, *([] if run.precision.scaler is None else [run.precision.scaler])]
    states = send_to_device([keeper.state_dict() for keeper in keepers], "cpu")  # else all receive on the giver's GPU
    giver = max(rank for rank, came in enumerate(last) if came)
    collectives.broadcast_object_list(run.world.exchange, states, giver, "join_uneven_inputs")
    if not probe.came_last:
        for keeper, state in zip(keepers, states, strict=True):
            keeper.load_state_dict(state)


def _override(loader: PreparedLoader, even_batches: bool, undo: ExitStack) -> None:
    shard = loader.batch_sampler
    if isinstance(shard, BatchSamplerShard):
        undo.callback(setattr, shard, "even_batches", shard.even_batches)
        shard.even_batches = even_batches
        return
    warnings.warn(
        "join_uneven_inputs: overriding even_batches is only supported for map-style datasets that each rank reads "
        "for itself. Other loaders stay as they are.",
        stacklevel=4,
    )
