# SPDX-License-Identifier: Apache-2.0
"""Every error that Farflung raises on purpose: what happened, the values seen, what to do.

FarflungError
|-- ConfigError (ValueError)             a setting or an argument that cannot work
|   |-- WrongType (TypeError)            an argument of another kind than the call takes
|   `-- ShapeMismatch (RuntimeError)     tensors whose shapes don't fit together
|-- NonFinite (FloatingPointError)       too many steps in a row were not finite
|-- StateError (RuntimeError)            a call at the wrong time: before `prepare`, after the end, twice
|   `-- StateReset (AttributeError)     a state class was read after its reset
|-- Unsupported (NotImplementedError)    something Farflung does not do; the message names what to use instead
|-- CollectiveMismatch (RuntimeError)    ranks brought different things to one collective
|-- RankFailure (RuntimeError)           another rank failed or left; the message names it
|-- Unreachable (RuntimeError)           the store that the replicas of a run share gives no answer
`-- CheckpointError (RuntimeError)       a checkpoint that could not be written, or is not whole; nothing else is hurt
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from farflung.base.causes import Cause
from farflung.base.words import shortened


class FarflungError(Exception):
    """The root: catch it to catch everything that Farflung raises on purpose.

    Args:
        problem: the message or, with a setting, what follows its name.
        setting: what the error is about, with which the message then begins. A launcher names it as the user wrote it.

    Attributes:
        together: the errors that this one joins, one a line.
    """

    cause = Cause.WRONG_USE
    together: tuple[FarflungError, ...] = ()

    def __init__(self, problem: str = "", setting: str = "") -> None:
        super().__init__(f"{setting} {problem}" if setting else problem)
        self.problem, self.setting = problem, setting

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(FarflungError, ValueError):
    """A setting or an argument that cannot work."""


class WrongType(ConfigError, TypeError):
    """An argument of another kind than the call takes."""


class ShapeMismatch(ConfigError, RuntimeError):
    """Tensors whose shapes don't fit together; if torch joins them alone, it raises a RuntimeError too."""


class StateError(FarflungError, RuntimeError):
    """A call that came at the wrong time."""


class NonFinite(FarflungError, FloatingPointError):
    """Too many steps in a row had a loss or gradients that are not finite."""

    cause = Cause.OWN


class StateReset(StateError, AttributeError):
    """A state class was read after its reset, when it has no attributes."""


class Unsupported(FarflungError, NotImplementedError):
    """Something that Farflung does not do; the message says what to use instead."""


class CollectiveMismatch(FarflungError, RuntimeError):
    """Ranks brought different things to one collective; the same error is raised on each of them."""


DistributedOperationException = CollectiveMismatch  # Accelerate's name


class RankFailure(FarflungError, RuntimeError):
    """Another rank failed or left; the message names it."""

    def __init__(self, message: str, cause: Cause = Cause.PEER) -> None:
        super().__init__(message)
        self.cause = cause


class Unreachable(FarflungError, RuntimeError):
    """The store that the replicas of a run share gives no answer.

    Attributes:
        is_gone: it will give none: nobody listens at its address, or another run is served there.
    """

    cause = Cause.ENGINE

    def __init__(self, message: str, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class CheckpointError(FarflungError, RuntimeError):
    """A checkpoint that could not be written, or is not whole. The checkpoints before it and the run are untouched."""

    cause = Cause.OWN


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean ...?` for the known word nearest to `word`, or an empty string when none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f" Did you mean `{near[0]}`?" if near else ""
