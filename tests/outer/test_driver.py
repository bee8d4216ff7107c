# SPDX-License-Identifier: Apache-2.0
"""When a loop that follows the data is flushed: once for each pass, wherever a script steps, stops or skips."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farflung.base.errors import StateError
from farflung.comm.group import SoloGroup
from farflung.hosts.driver import Driver, EpochTracker, LoopMembers
from farflung.outer import diloco


class Reading(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def flushed(script, share=None, every=1):
    """Return the script with an `F` after each call in which the loop was flushed.

    `<` `>` `x` begin, end and leave a pass over the training data, `|` begins one and leaves the one before it, `.`
    hands out a batch, `s` steps, `o` steps while another optimizer is awaited, and `!` is a call of all ranks. `[` `]`
    `}` `e` are for other data: they begin a pass, and end it in eval mode, in train mode, or in a mode that is not
    known.
    """
    flushes, train, other, current, seen = [], object(), object(), None, ""
    tracker = EpochTracker(lambda: flushes.append("F"))
    for word in script:
        flushes.clear()
        before = current
        if word in "<[|":
            loader = SimpleNamespace(base_dataloader=other if word == "[" else train, share=share)
            current = Reading(loader=loader, num_batches=0, end_of_dataloader=False, is_beside=False)
            tracker.iteration_starts(loader)
            if word == "|":
                tracker.iteration_ended(before, at_end=False)
        elif word == ".":
            current.num_batches += 1
            current.end_of_dataloader = current.num_batches == 3  # all that there are
        elif word in "so":
            tracker.step_attempted(current, word == "o", every)
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


@pytest.mark.parametrize(
    "script",
    [
        "<.s|.s!|.s|.s|.sx !F",  # next(iter(loader)) in each step, and calls of all ranks in between
        "<.sx <.s.sx <.s.sx !F",
        "<.s.s.sF> <.sx <.s.s.sF>",
        "<.sx [...] <.s.s.sF>",
        "<.s.sx !F <.s.s.sF>",  # the script does something else after such a pass
    ],
)
def test_passes_of_fewer_steps_than_a_round_that_follow_each_other_are_no_epochs(script):
    assert flushed(script.replace("F", ""), every=3) == script


def test_a_pass_that_the_others_are_through_with_is_not_flushed_and_one_that_ends_is_recorded():
    ended = []
    share = SimpleNamespace(is_past=False, synchronized=lambda: ended.append(1))
    assert flushed("<.s.s.s> <.sx !", share) == "<.s.s.sF> <.sx !F"
    assert len(ended) == 2
    share.is_past = True
    assert flushed("<>", share) == "<>"
    assert len(ended) == 2


@pytest.mark.parametrize(("frozen", "every"), [(True, 8), (False, 8), (True, 32)])
def test_an_adapter_in_short_rounds_gets_advice_once(frozen, every, capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    driver = Driver(model, diloco(every), LoopMembers(SoloGroup()), optimizer, lambda: None, pytest.fail)
    for _ in range(4):
        driver.step_attempted(optimizer, True, None)
    driver.end()
    assert capsys.readouterr().err.count("max_momentum=0.5") == (frozen and every == 8)


def test_no_state_is_saved_while_one_of_two_models_has_the_agreed_weights():
    models = nn.ModuleDict({"0": nn.Linear(2, 1), "1": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
    driver = Driver(models, diloco(4), LoopMembers(SoloGroup()), optimizer, lambda: None, pytest.fail)
    with torch.no_grad():
        models["0"].bias.add_(1.0)
        models["1"].bias.add_(1.0)
    driver.loop.count()
    own = [models[name].bias.item() for name in "01"]
    with driver.agreed(models["1"]):
        assert [models[name].bias.item() for name in "01"] == [own[0], pytest.approx(own[1] - 1)]
        with pytest.raises(StateError, match="eval"):
            driver.loop.state_dict()
    assert driver.loop.state_dict()
    driver.drop()
