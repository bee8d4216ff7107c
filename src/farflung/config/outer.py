# SPDX-License-Identifier: Apache-2.0
"""The outer loop as plain names and values, which a script, a file, a variable or a flag can say alike.

This room knows neither torch nor the recipes: `RECIPES` says what there is, so that a launcher can refuse what can't
work before it starts anything. The bridge of the accelerator's room makes a recipe of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from farflung.base.checks import check_flag, check_number, check_text, check_whole, check_word
from farflung.base.errors import ConfigError

MACHINE = "machine"
_ALL = "all"


@dataclass(frozen=True)
class Options:
    """What a recipe takes: what it needs, what it may be given, and whether it keeps an anchor."""

    needed: tuple[str, ...]
    possible: tuple[str, ...]
    anchored: bool

    @property
    def known(self) -> tuple[str, ...]:
        """All options that `OuterConfig` takes with it."""
        return (*self.needed, *self.possible, *COMMON, *(("anchor_on_cpu",) if self.anchored else ()))


COMMON = ("weigh_by", "inner", "bucket_bytes", "log")
RECIPES: Mapping[str, Options] = {
    "local_sgd": Options((), ("every", "codec"), False),
    "post_local_sgd": Options(("warmup",), ("every", "codec"), False),
    "hierarchical": Options(("levels",), ("codec",), False),
    "quadratic": Options(("every", "alpha"), ("codec",), False),
    "slowmo": Options((), ("every", "alpha", "beta", "codec"), True),
    "diloco": Options((), ("every", "rounds", "lr", "momentum", "nesterov", "codec"), True),
    "streaming_diloco": Options(
        (), ("every", "fragments", "delay", "alpha", "rounds", "lr", "momentum", "codec"), True
    ),
    "eager_diloco": Options((), ("every", "rounds", "lr", "momentum", "codec"), True),
    "sparse_loco": Options((), ("every", "lr", "beta", "codec"), True),
    "edit": Options((), ("every", "seconds", "lr", "momentum", "threshold", "temperature", "longest", "codec"), True),
    "gossip": Options((), ("every", "codec"), False),
    "noloco": Options((), ("every", "lr", "momentum", "codec"), True),
}
CODECS = ("none", "bf16", "fp16", "int8", "int4", "fp8", "e3m0", "topk")
WORDS: Mapping[str, tuple[str, ...]] = {
    "codec": CODECS,
    "weigh_by": ("steps", "items"),
    "inner": ("keep", "reset", "average"),
}
HELP: Mapping[str, str] = {
    "every": "Sync interval H: optimizer steps between two rounds.",
    "rounds": "Planned number of rounds: below 100 the default momentum is lower.",
    "lr": "Learning rate of the outer optimizer.",
    "momentum": "Momentum of the outer optimizer.",
    "nesterov": "Use Nesterov momentum in the outer optimizer (diloco only).",
    "alpha": (
        "quadratic: H = max(every, floor((alpha / lr)^2)). slowmo: learning rate of the outer optimizer. "
        "streaming_diloco: weight of the local parameters when they are merged with the anchor, from 0 to 1."
    ),
    "beta": "slowmo: momentum of the outer optimizer. sparse_loco: decay of the error feedback in each round.",
    "fragments": "Number of fragments the model is split into (streaming_diloco only).",
    "delay": "Steps for which a fragment's exchange may overlap with training (streaming_diloco only).",
    "warmup": "Number of first steps in which gradients are averaged (post_local_sgd only).",
    "levels": "Which ranks are averaged after how many steps, such as 4:machine,64:all (hierarchical only).",
    "seconds": "Seconds between two rounds, instead of --outer_every (edit only).",
    "threshold": "Z-score of the pseudo-gradient's norm above which a replica is left out (edit only).",
    "temperature": "Softmax temperature for weighting replicas (edit only).",
    "longest": "Maximum norm of the averaged pseudo-gradient (edit only).",
    "codec": "Encoding of what is sent: a cast, quantization or top-k.",
    "weigh_by": "Weight replicas by the optimizer steps or the items (samples, tokens) they processed.",
    "anchor_on_cpu": "Keep the anchor and the outer optimizer's state in host memory.",
    "inner": "What a round does with the inner optimizer's state.",
    "bucket_bytes": "Bucket size: bytes sent at a time. [an eighth of the trainable parameters, 4 to 12.5 MiB]",
    "log": "Append one line of JSON per round to this file; with {rank} in the name, one file per rank.",
}  # what each option does, as its flag's help says it

_WHOLE = {
    "every": 1,
    "rounds": 1,
    "fragments": 1,
    "delay": 0,
    "warmup": 0,
    "bucket_bytes": 1,
}  # the least that each may be
_POSITIVE = ("lr", "seconds", "threshold", "temperature", "longest")
_FRACTIONS = ("momentum", "beta")


@dataclass(frozen=True)
class OuterConfig:
    """An outer loop by the names of its recipe and options: `Accelerator(outer=OuterConfig("diloco", every=32))`.

    An option that is None takes the recipe's default; see the functions of `farflung.outer` with the recipes' names.

    Args:
        recipe: `local_sgd`, `post_local_sgd`, `hierarchical`, `quadratic`, `slowmo`, `diloco`, `streaming_diloco`,
            `eager_diloco`, `sparse_loco`, `edit`, `gossip` or `noloco`.
        every: sync interval H: optimizer steps between two rounds.
        rounds: planned number of rounds, if known: below 100 the default momentum is lower.
        warmup: number of first steps in which gradients are averaged as usual.
        levels: of `hierarchical`: maps optimizer steps to how many neighbouring ranks average then; `machine` means
            the ranks of a machine, None all ranks: `{4: "machine", 64: None}`. As a string: `4:machine,64:all`.
        seconds: seconds between two rounds of `edit`, instead of `every`.
        codec: encoding of what is sent: `none` (as it is), `bf16`, `fp16`, `int8`, `int4`, `fp8`, `e3m0`
            or `topk`.
        weigh_by: weight replicas by their `steps`, or by the `items` in them: those passed to `backward(num_items=)`,
            or else the samples of their batches.
        anchor_on_cpu: keep the anchor and the outer optimizer's state in host memory.
        inner: what a round does with the inner optimizer's state: `keep` (each rank its own), `reset`, `average`.
        bucket_bytes: bucket size; see `OuterLoop`. Larger buckets pay off on fast links with high latency.
        log: a file to which the main process appends a line of JSON for each round; with `{rank}` in its name, one
            file per rank.

    Raises:
        ConfigError: an unknown recipe, a missing or unknown option, or an invalid value.
    """

    recipe: str
    every: int | None = None
    rounds: int | None = None
    lr: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    alpha: float | None = None
    beta: float | None = None
    fragments: int | None = None
    delay: int | None = None
    warmup: int | None = None
    levels: Mapping[int, int | str | None] | str | None = None
    seconds: float | None = None
    threshold: float | None = None
    temperature: float | None = None
    longest: float | None = None
    codec: str | None = None
    weigh_by: str | None = None
    anchor_on_cpu: bool | None = None
    inner: str | None = None
    bucket_bytes: int | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        check_word("The recipe of an outer loop", self.recipe, RECIPES)
        self._check_options()
        self._check_values()
        if self.levels is not None:
            object.__setattr__(self, "levels", _levels(self.levels))

    def given(self) -> dict[str, Any]:
        """Return the options that are not left to the recipe, by name."""
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "recipe"}
        return {name: value for name, value in options.items() if value is not None}

    def _check_options(self) -> None:
        options, given = RECIPES[self.recipe], self.given()
        odd = [name for name in given if name not in options.known]
        if odd:
            raise ConfigError(f"{self.recipe} has no option {', '.join(odd)}; it takes {', '.join(options.known)}.")
        missing = [name for name in options.needed if name not in given]
        if missing:
            raise ConfigError(f"{self.recipe} needs {', '.join(missing)}.")
        if self.recipe == "edit" and self.every is not None and self.seconds is not None:
            raise ConfigError(f"edit takes either every or seconds; they are {self.every} and {self.seconds}.")

    def _check_values(self) -> None:
        for name, value in self.given().items():
            if name in _WHOLE:
                check_whole(name, value, least=_WHOLE[name])
            if name in (*_POSITIVE, *_FRACTIONS, "alpha"):
                self._check_number(name, value)
            if name in ("nesterov", "anchor_on_cpu"):
                check_flag(name, value)
            if name == "log":
                check_text(name, value)
            if name in WORDS:
                check_word(name, value, WORDS[name])
        if self.every is not None:
            for name in ("fragments", "delay"):
                value = getattr(self, name)
                if value is not None and value > self.every:
                    raise ConfigError(f"{name} is {value}; it must be at most every, which is {self.every}.")

    def _check_number(self, name: str, value: Any) -> None:
        if name == "alpha" and self.recipe == "streaming_diloco":
            check_number(name, value, least=0, most=1)
        elif name == "beta" and self.recipe == "sparse_loco":
            check_number(name, value, above=0, most=1)
        elif name in _FRACTIONS:
            check_number(name, value, least=0, below=1)
        else:
            check_number(name, value, above=0)


def outer_config(said: Mapping[str, Any], called: str) -> OuterConfig | None:
    """Return what the options in `said` make up; None where no option is said. Those that are None are not said.

    Args:
        called: how the recipe is said where these come from, for the error when it is missing.

    Raises:
        ConfigError: they can't work, or the recipe is missing.
    """
    given = {name: value for name, value in said.items() if value is not None}
    if not given:
        return None
    if "recipe" not in given:
        flag = called.startswith("--")
        names = [f"--outer-{name.replace('_', '-')}" if flag else f"FARFLUNG_OUTER_{name.upper()}" for name in given]
        verb, example = "needs" if len(names) == 1 else "need", f"{called}{' ' if flag else '='}diloco"
        raise ConfigError(f"{', '.join(names)} {verb} a recipe: set {called}, for example {example}.")
    return OuterConfig(**given)


def renamed(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    """Return an error of `OuterConfig`, which begins with the option that it is about, with that option's other name.

    Args:
        names: what the user wrote, by option: a flag, a variable, a key of a file.
    """
    option, _, rest = str(error).partition(" ")
    return type(error)(f"{names[option]} {rest}") if option in names else error


def _levels(said: Mapping[int, int | str | None] | str) -> dict[int, int | str | None]:
    pairs: list[tuple[Any, Any]] = list(said.items()) if isinstance(said, Mapping) else []
    if isinstance(said, str):
        parts = [part.partition(":") for part in said.split(",")]
        pairs = [(_whole(every), _whole(size.strip())) for every, _, size in parts]
    levels: dict[int, int | str | None] = {}
    for every, size in pairs:
        size = None if size == _ALL else size
        fits = size is None or size == MACHINE or (type(size) is int and size >= 2)
        if type(every) is not int or every < 1 or not fits or every in levels:
            raise ConfigError(
                f"levels is {said!r}; map each number of steps to how many ranks average after it: 2 or more, "
                "'machine' or 'all', such as '4:machine,64:all'."
            )
        levels[every] = size
    if not levels or levels[max(levels)] is not None or list(levels.values()).count(None) > 1:
        raise ConfigError(
            f"levels is {said!r}; one level must be all ranks ('all'), and it must be the least frequent."
        )
    return levels


def _whole(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdecimal() else text
