# SPDX-License-Identifier: Apache-2.0
"""Published methods, one function each: the parts of the engine that make up a recipe.

A function whose name `__all__` lists is a recipe everywhere: in `farflung.outer`, as a name in a script, and on the
command line, in files and in the environment (`--outer diloco`, its arguments as `--outer-<argument>`). Types and help
of those come from its signature and the section `Args:` of its docstring (`config/recipes.py` reads this file's text).
An argument that several recipes describe in the same words means the same in all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from farflung.base.checks import check_callable, check_flag, check_number, check_type, check_whole, check_word
from farflung.base.errors import ConfigError
from farflung.codec.base import Codec
from farflung.codec.feedback import ErrorFeedback
from farflung.codec.named import codec_of
from farflung.methods.aggregate import GatherMean, Gossip, RadialMean, ReduceScatterMean, mean_of
from farflung.methods.agreement import Aggregator, Blend, MakeOptimizer
from farflung.methods.fragments import Cut, Fragment, by_bytes, strided
from farflung.methods.momentum import OuterSGD
from farflung.methods.policies import ClippedToMedian, WithoutOutliers
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import ByTime, Every, Levels, Quadratic, Schedule, Streaming, Warmup

__all__ = [
    "diloco",
    "eager_diloco",
    "edit",
    "gossip",
    "hierarchical",
    "local_sgd",
    "noloco",
    "post_local_sgd",
    "quadratic",
    "slowmo",
    "sparse_loco",
    "streaming_diloco",
]

# Below this many rounds a constant outer momentum of 0.9 has no time to pay back: benchmarks/bench_outer_momentum.py.
_MANY_ROUNDS = 100
_EXCHANGES: Mapping[str, Aggregator] = {"gather": GatherMean(hops=1), "reduce_scatter": ReduceScatterMean()}

# Steps between two rounds if nobody says how many: 8 if the weights themselves are averaged, as in the guide to
# Local SGD that most scripts follow, and 32 if replicas send what has changed since an anchor.
_OFTEN, _SELDOM = 8, 32


def local_sgd(every: int = _OFTEN, *, codec: Codec | str | None = None) -> Recipe:
    """Train independently for `every` optimizer steps, then average: local <- mean(local).

    Args:
        every: sync interval H, in optimizer steps.
        codec: encoding of what is sent: a cast, quantization or top-k.

    Raises:
        ConfigError: `every` is not a positive integer.

    It fails if replicas drift apart between rounds: with a large learning rate or many steps. A codec costs accuracy
    in each round, even a cast to 16 bits, because it rounds the weights themselves: `diloco` rounds only the
    pseudo-gradient.

    Source: Local SGD converges fast and communicates little (arXiv:1805.09767).
    """
    return _averaging(Every(every), codec)


def post_local_sgd(warmup: int, every: int = _OFTEN, *, codec: Codec | str | None = None) -> Recipe:
    """Average gradients in each of the first `warmup` steps, then train as `local_sgd(every)`.

    Under an `Accelerator`, DDP averages gradients during the warm-up, which is refused where replicas come and go; in a
    plain loop `attach` the optimizer, or call `average_gradients` before each of its steps. It saves nothing in a run
    hardly longer than the warm-up.

    Args:
        warmup: number of first steps in which gradients are averaged.

    Raises:
        ConfigError: a number is out of its range.

    Source: Don't use large mini-batches, use local SGD (arXiv:1808.07217).
    """
    check_whole("warmup", warmup, least=0)
    return _averaging(Warmup(warmup, Every(every)), codec)


def hierarchical(levels: Mapping[int, int | None], *, codec: Codec | str | None = None) -> Recipe:
    """Average often within groups of neighbouring ranks, less often over all ranks: `hierarchical({4: 8, 64: None})`.

    After a step at which several levels are due, the widest is taken: local <- mean over the ranks of that level.

    Args:
        levels: how many neighbouring ranks average after how many optimizer steps: `{4: 8, 64: None}`, as text
            `4:machine,64:all`. Use the number of ranks on each machine. The last group may be smaller, but not one.

    Raises:
        ConfigError: the widest level is not all ranks, or is not the least frequent one.

    It helps only if some links are much faster than others.

    Source: torch's hierarchical model averager; DASO (arXiv:2104.05588).
    """
    check_type("levels", levels, Mapping, "a dictionary of steps and neighbours, such as {4: 8, 64: None}")
    return _averaging(Levels(dict(levels)), codec)


def quadratic(every: int, alpha: float, *, codec: Codec | str | None = None) -> Recipe:
    """Average after H = max(every, floor((alpha / lr)**2)) steps: rounds get longer as the learning rate decays.

    lr is the inner learning rate at the start of the round, or its maximum since then if it rises, as in a warm-up; the
    loop must know the inner optimizer. The last round ends with training.

    Args:
        every: steps in the shortest round.
        alpha: on the order of the peak learning rate times sqrt(every); the paper tunes it.

    Raises:
        ConfigError: a number is out of its range.

    With a constant learning rate it is `local_sgd`; it needs a decaying one to save anything.

    Source: a quadratic synchronization rule (arXiv:2310.14423).
    """
    return _averaging(Quadratic(every, alpha), codec)


def slowmo(
    every: int = _SELDOM,
    *,
    alpha: float = 1.0,
    beta: float = 0.6,
    average: int | None = None,
    codec: Codec | str | None = None,
) -> Recipe:
    """Average every `every` steps, then apply a slow momentum to the averaged change.

        u <- beta u + Delta / gamma;  anchor <- anchor - alpha gamma u;  local <- anchor

    gamma is the inner learning rate; if it is constant, this is SGD with heavy-ball momentum (lr alpha, momentum beta),
    which is what runs here.

    Args:
        alpha: slow learning rate; the paper keeps it at 1.
        beta: slow momentum, from 0.4 to 0.8 in the paper.

    Raises:
        ConfigError: a number is out of its range.

    If the learning rate changes much within a few rounds, this differs from the paper's method.

    Source: SlowMo (arXiv:1910.00643).
    """
    check_number("alpha", alpha, above=0)
    check_number("beta", beta, least=0, below=1)
    return _anchored(Every(every), codec, _sgd(alpha, beta, nesterov=False), average=average)


def diloco(
    every: int = _SELDOM,
    *,
    seconds: float | None = None,
    rounds: int | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    max_momentum: float | None = None,
    nesterov: bool = True,
    radial: bool = False,
    average: int | None = None,
    codec: Codec | str | None = None,
    exchange: str | None = None,
) -> Recipe:
    """Train independently for `every` steps; the mean pseudo-gradient then drives an outer SGD with momentum.

        Delta = mean(anchor - local);  m <- momentum * m + Delta;  anchor <- anchor - lr * (Delta + momentum * m);
        local <- anchor

    With `nesterov=False` the step is lr * m. One replica and momentum 0 make it Lookahead.

    The published lr 0.7 and momentum 0.9 were found on hundreds of rounds; in shorter runs so large a momentum is still
    building up when training ends. So by default it grows: in round t it is t / (t + 10), up to 0.9, and sooner with H
    above 32. No run has to know its length for that. The default lr depends on H: 0.7 for 8 to 16, 0.85 from
    32 on, and in proportion below 8; with a constant momentum it is the published one.

    Args:
        every: sync interval H, in optimizer steps.
        seconds: seconds between two rounds, instead of H steps: fast replicas do more steps than slow ones. Call
            `gather` or `save_state` where all ranks come together: after an epoch or a flush. H then only says about
            how many steps that is, for the default lr and momentum.
        rounds: planned number of rounds, if known: a constant momentum that needs more of them gets a warning.
        lr: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer, the same in all rounds. None: it grows with them.
        max_momentum: what a momentum that grows does so up to: by default 0.9; better 0.8 if the inner rate stays, or
            in rounds of 4 steps.
        nesterov: use Nesterov momentum in the outer optimizer; without momentum it has no effect.
        radial: give the mean of each tensor the mean of the replicas' norms as its length (`RadialMean`), so that one
            `lr` suits any number of replicas; embeddings keep the plain mean.
        average: evaluate, save and leave a running mean of the weights over this many rounds, a tenth of those so far
            at most: better than the last ones where the inner learning rate does not fall. It sends nothing, and takes
            one more copy of the weights in fp32.
        codec: encoding of what is sent: a cast, quantization or top-k.
        exchange: how encoded values get to all: `gather`, each rank sends all others its own, or `reduce_scatter`, each
            sums a part and sends that encoded again. None: among more than two ranks what sends less.

    Raises:
        ConfigError: a number is out of its range.

    Source: DiLoCo (arXiv:2311.08105); `radial` is of Decoupled DiLoCo (arXiv:2604.21428).
    """
    schedule: Schedule = Every(every) if seconds is None else ByTime(seconds)
    optimizer = _nesterov(every, lr, momentum, rounds, nesterov, largest=max_momentum)
    return _anchored(schedule, codec, optimizer, radial=radial, exchange=exchange, average=average)


def streaming_diloco(
    every: int = _SELDOM,
    fragments: int = 4,
    *,
    delay: int = 1,
    alpha: float = 0.5,
    rounds: int | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    radial: bool = False,
    average: int | None = None,
    codec: Codec | str | None = None,
    exchange: str | None = None,
    cut: Cut | None = None,
) -> Recipe:
    """`diloco` fragment by fragment, with four bits per value, overlapped with training.

    Fragment p is sent every `every` steps, each fragment at a different step, and applied `delay` steps later:

        Delta_p = mean(Q(anchor_p - local_p)), computed when it is sent;  anchor_p <- outer_opt(anchor_p, Delta_p);
        local_p <- alpha * local_p + (1 - alpha) * anchor_p

    Args:
        every: steps between two rounds of the same fragment.
        fragments: number of fragments the model is split into.
        delay: steps for which a fragment's exchange may overlap with training.
        alpha: weight of the local parameters in the merge, from 0 (take the anchor) to 1 (keep local).
        rounds: planned number of rounds, if known: a constant momentum that needs more of them gets a warning.
        lr: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer.
        codec: by default E3M0, four bits without a mantissa.
        cut: None is `strided` if the model has enough layers, else `by_bytes`.

    Raises:
        ConfigError: a number is out of its range.

    By default lr is that of `diloco`, and the momentum grows twice as fast, as weights take a part of the anchor only.
    A delay that is not small compared with `every` costs accuracy: updates are applied that many steps late.

    Source: Streaming DiLoCo (arXiv:2501.18512).
    """
    if cut is not None:
        check_callable("cut", cut, "farflung.outer.strided")
    schedule = Streaming(every, fragments, delay)
    optimizer = _nesterov(every, lr, momentum, rounds, sooner=2.0)
    parts = {"merge": Blend(alpha), "fragments": cut or by_layers, "average": average}
    return _anchored(schedule, codec, optimizer, usual="e3m0", radial=radial, exchange=exchange, **parts)


def eager_diloco(
    every: int = _SELDOM,
    *,
    rounds: int | None = None,
    lr: float = 0.7,
    momentum: float = 0.3,
    codec: Codec | str | None = None,
) -> Recipe:
    """`diloco` whose exchange overlaps with a whole round; each rank replaces its own stale term by the current one.

        g_i(t) = mean(t-1) + (Delta_i(t) - Delta_i(t-1)) / M;  anchor_i <- outer_opt(anchor_i, g_i)

    Every replica has its own anchor; at the end weights are averaged. The default momentum is small and doesn't grow,
    as a round's mean is a round old. Plain delay, without the correction, is not offered: 500M parameters ended at 3.01
    with it, at 2.69 with the correction and at 2.67 without any delay.

    Args:
        every: sync interval H, in optimizer steps.
        codec: by default Int8.

    Raises:
        ConfigError: a number is out of its range.

    The equation follows the paper's abstract and figures; its pseudocode was not available.

    Source: eager updates (arXiv:2502.12996).
    """
    optimizer = _nesterov(every, lr, momentum, rounds)
    return _anchored(Streaming(every, 1, every), codec, optimizer, usual="int8", eager=True)


def sparse_loco(
    every: int = 30,
    *,
    lr: float = 4.0,
    beta: float = 0.9,
    average: int | None = None,
    codec: Codec | str | None = None,
) -> Recipe:
    """Send the 64 largest of every 4096 values in 2 bits, and the rest in later rounds: 146 times fewer bits.

        e <- beta e + Delta;  c = Q(TopK(e));  e <- e - c;  anchor <- anchor - lr * mean(clip(c))

    `clip` scales a replica's c down to the median norm of all replicas'. There is no outer momentum: the error
    feedback e takes its place.

    Args:
        every: from 15 to 30 steps in the paper.
        lr: learning rate of the outer optimizer.
        beta: decay of the error feedback in each round.
        codec: by default TopK(64, 4096) with 2 bits a value.

    Raises:
        ConfigError: a number is out of its range.

    Part of the update is unsent at any time, and in runs with few rounds a large lr makes up for it: in 14 to 112
    rounds of a small model 1.0 ended 4 to 6 % higher than 4.0. The paper's beta is 0.95, which is better from about 100
    rounds on (docs/evidence.md).

    Source: SparseLoCo (arXiv:2508.15706).
    """
    check_number("beta", beta, above=0, most=1)
    inside = codec_of(codec, "topk")
    inside = inside if isinstance(inside, ErrorFeedback) else ErrorFeedback(inside, beta)
    optimizer = _sgd(lr, 0.0, nesterov=False)
    return _anchored(Every(every), inside, optimizer, policy=ClippedToMedian(), average=average)


def edit(
    every: int | None = None,
    *,
    seconds: float | None = None,
    lr: float = 0.7,
    momentum: float = 0.8,
    threshold: float = 3.0,
    temperature: float = 1.0,
    max_norm: float = 10.0,
    average: int | None = None,
    codec: Codec | str | None = None,
) -> Recipe:
    """`diloco` that leaves out outlier replicas, gives those with small norms more weight, and clips the mean.

        w_i = softmax(-|Delta_i| / T) over accepted replicas;  g = sum_i w_i Delta_i;  g <- g * min(1, max_norm / |g|)

    Args:
        every: by default 32 steps, unless `seconds` is given.
        seconds: seconds between two rounds, instead of `every`; see `diloco`.
        lr: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer.
        threshold: z-score of a replica's norm, against its own history, above which the replica is left out.
        temperature: softmax temperature T; an infinite one gives all accepted replicas the same weight.
        max_norm: maximum norm of the averaged pseudo-gradient.

    Raises:
        ConfigError: both `every` and `seconds`, or a number out of its range.

    With two replicas there is little to compare; the statistics are each replica's own.

    Source: EDiT (arXiv:2412.07210), whose published code feeds rejected norms to its statistics; here they are not.
    """
    if every is not None and seconds is not None:
        raise ConfigError(f"edit: every is {every!r} and seconds is {seconds!r}; give one of them.")
    schedule: Schedule = ByTime(seconds) if seconds is not None else Every(_SELDOM if every is None else every)
    policy = WithoutOutliers(threshold=threshold, temperature=temperature, max_norm=max_norm)
    return _anchored(schedule, codec, _sgd(lr, momentum, nesterov=True), policy=policy, average=average)


def gossip(every: int = _OFTEN, *, codec: Codec | str | None = None) -> Recipe:
    """Every `every` steps average with one other rank, a different one each time: local <- (local_i + local_j) / 2.

    Replicas differ throughout training, and are averaged at the end. A rank sends its weights once per round, however
    many ranks there are; an all-reduce sends them nearly twice. Votes are still exchanged among all ranks.

    Raises:
        ConfigError: a number is out of its range.

    With many ranks and few rounds replicas stay far apart.

    Source: stochastic gradient push (arXiv:1811.10792); NoLoCo (arXiv:2506.10911) adds an outer momentum to it.
    """
    return replace(_averaging(Every(every), codec), aggregator=Gossip())


def noloco(
    every: int = _SELDOM,
    *,
    lr: float = 0.7,
    momentum: float = 0.6,
    pull: float = 1.0,
    codec: Codec | str | None = None,
) -> Recipe:
    """`gossip` with pseudo-gradients: each replica has its own anchor and its own outer momentum.

        Delta_i <- (Delta_i + Delta_j) / 2 + pull (anchor_i - anchor_j) / 2;  m_i <- momentum m_i + Delta_i;
        anchor_i <- anchor_i - lr (Delta_i + momentum m_i)

    The pull brings the anchors of replicas together, which otherwise drift apart. It costs no bytes: a replica sends
    Delta - pull anchor in place of Delta, and with pull 1 that is its weights. Of DDP's gain over one replica, four
    small models keep 49 % with it and 14 % without, tuned each (docs/evidence.md). Two replicas have one anchor anyway.

    Args:
        lr: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer.
        pull: how strongly the anchors of two replicas are pulled together, from 0 to 1. A codec needs 0, because it
            would round the anchors too.

    Raises:
        ConfigError: a number is out of its range.
        Unsupported: a codec, and a pull that is not 0.

    If lr and momentum are both large, anchors overshoot: 1.0 and 0.6 drive those of 16 replicas apart.

    Source: NoLoCo (arXiv:2506.10911), whose published code has pull 1 and steps by lr m_i, without Nesterov's term.
    """
    recipe = _anchored(Every(every), codec, _sgd(lr, momentum, nesterov=True))
    return replace(recipe, aggregator=Gossip(pull))


def by_layers(model: torch.nn.Module, count: int) -> list[Fragment]:
    """Split with `strided`, or with `by_bytes` if the model has fewer layers than fragments."""
    try:
        return strided(model, count)
    except ConfigError:
        return by_bytes(model, count)


def _averaging(schedule: Schedule, codec: Codec | str | None) -> Recipe:
    codec = codec_of(codec, "none")
    return Recipe(schedule=schedule, codec=codec, aggregator=mean_of(codec))


def _anchored(
    schedule: Schedule,
    codec: Codec | str | None,
    optimizer: MakeOptimizer,
    usual: str = "none",
    radial: bool = False,
    exchange: str | None = None,
    **parts: Any,
) -> Recipe:
    check_flag("radial", radial)
    codec = codec_of(codec, usual)
    aggregator = RadialMean() if radial else mean_of(codec)
    if exchange is not None:
        check_word("exchange", exchange, _EXCHANGES)
        if radial:
            raise ConfigError(f"is {exchange!r}, but radial=True has an exchange of its own.", "exchange")
        aggregator = _EXCHANGES[exchange]
    return Recipe(schedule=schedule, codec=codec, aggregator=aggregator, optimizer=optimizer, **parts)


def _nesterov(
    every: int,
    lr: float | None,
    momentum: float | None,
    rounds: int | None,
    nesterov: bool = True,
    sooner: float = 1.0,
    largest: float | None = None,
) -> MakeOptimizer:
    """SGD with this momentum, or with one that grows; warns of a momentum that has not worked in so few rounds."""
    optimizer = OuterSGD(every, lr, momentum, nesterov, sooner, largest)
    if rounds is not None:
        check_whole("rounds", rounds, least=1)
    if momentum is not None and momentum >= 0.9 and rounds is not None and rounds < _MANY_ROUNDS:
        warnings.warn(
            f"diloco: an outer momentum of {momentum} needs hundreds of rounds to pay off, but {rounds} are planned; "
            "in short runs it has ended at a clearly higher loss than the default, which grows with the rounds.",
            stacklevel=3,
        )
    return optimizer


def _sgd(lr: float, momentum: float, nesterov: bool) -> MakeOptimizer:
    """SGD whose settings do not follow from H."""
    check_number("lr", lr, above=0)
    check_number("momentum", momentum, least=0, below=1)
    return OuterSGD(_SELDOM, lr, momentum, nesterov)
