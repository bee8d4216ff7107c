# SPDX-License-Identifier: Apache-2.0
"""When a loop that follows the data is flushed: once for each pass, wherever a script steps, stops or skips."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from farflung.outer.driver import EpochTracker


@dataclass(eq=False)
class Reading:
    """A pass over `data`, of which three batches are handed out."""

    data: str
    share: SimpleNamespace | None = None
    num_batches: int = 0
    end_of_dataloader: bool = False

    @property
    def loader(self):
        return SimpleNamespace(base_dataloader=self.data, share=self.share)


def flushed(script, share=None):
    """Return the script with an `F` after each call in which the loop was flushed.

    `<` `>` `x` begin, end and leave a pass over the training data, `.` hands out a batch, `s` steps, `o` steps while
    another optimizer is awaited, and `!` is a call of all ranks. `[` `]` `}` `e` are for other data: they begin a pass,
    and end it in eval mode, in train mode, or in a mode that is not known.
    """
    flushes, train, other, current = [], object(), object(), None
    tracker = EpochTracker(lambda: flushes.append("F"))
    seen = ""
    for word in script:
        flushes.clear()
        if word in "<[":
            current = Reading(train if word == "<" else other, share)
            tracker.iteration_starts(current.loader)
        elif word == ".":
            current.num_batches += 1
            current.end_of_dataloader = current.num_batches == 3
        elif word in "so":
            tracker.step_attempted(current, word == "o")
        elif word == "!":
            tracker.flush_owed()
        elif word in ">x]}e":
            tracker.iteration_ended(current, word != "x", {"]": False, "e": None}.get(word, True))
        seen += word + "".join(flushes)
    assert not tracker.is_owed
    assert not tracker.is_behind
    return seen


@pytest.mark.parametrize(
    "script",
    [
        "<.s.s.sF> <.s.s.sF>",  # in the step on the last batch
        "<.s.s.sFx <.s.s.sF>",  # also in a loop that is left there
        "<.ss.ss.ssF>",  # of the steps on a batch, the last one
        "<.os.os.osF>",  # once no other optimizer is awaited
        "<.s.s.>F",  # no step on the last batch: at the end
        "<.sx <F.s.s.sF>",  # left early: where the next pass begins
        "<.sx !F",  # or at the next call of all ranks
        "<.s.s.sF> <...>F <>F",  # all steps are skipped; there is no batch
        "<>F <.s.s.sF>",  # none in the first pass
        "<...> !F",  # all steps of the first pass are skipped
        "<.s.s.sF> [...] [...} [] <.s.s.sF>",  # other data
        "[] [...] <.s.s.sF>",  # an evaluation before the first step
        "[...} <.s.s.sF>",
        "[eF <.s.s.sF>",
    ],
)
def test_each_pass_over_the_training_data_is_flushed_once(script):
    assert flushed(script.replace("F", "")) == script


def test_a_pass_that_the_others_are_through_with_is_not_flushed_and_one_that_ends_is_recorded():
    ended = []
    share = SimpleNamespace(is_past=False, synchronized=lambda: ended.append(1))
    assert flushed("<.s.s.s> <.sx !", share) == "<.s.s.sF> <.sx !F"
    assert len(ended) == 2
    share.is_past = True
    assert flushed("<>", share) == "<>"
    assert len(ended) == 2
