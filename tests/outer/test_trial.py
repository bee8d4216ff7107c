# SPDX-License-Identifier: Apache-2.0
"""A loop whose recipe is chosen after its first steps: what it measures, when it chooses, and what it keeps."""

import json
import os
import re
import threading
import time
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farflung import OuterConfig
from farflung.auto.choice import Link, Measurements
from farflung.auto.trial import RecipeTrial
from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.comm.group import SoloGroup
from farflung.config.outer import OuterSettings
from farflung.members.elastic import Elastic
from farflung.methods.arguments import chosen_recipe
from farflung.methods.schedule import Every, Streaming, TrialSchedule
from farflung.outer import OuterLoop, slowmo
from farflung.outer.membership import FixedMembership
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.faults import fail_at
from tests.outer import test_saved_state as saved_states
from tests.outer.elastic_run import ElasticRun, transport_at
from tests.outer.islands import Grid, IslandRun
from tests.outer.replicas import Run, net, on_replicas, same, train, values
from tests.outer.test_membership import ChangingMembership, Lost, be_lost, door_of

CHOICES = {
    "diloco": OuterSettings("diloco", every=8, codec="e3m0"),
    "streaming": OuterSettings("streaming_diloco", every=8, fragments=2, delay=2),
    "weights": OuterSettings("local_sgd", every=8),
    "by time": OuterSettings("edit", seconds=1e-3),
    "gradients": OuterSettings("post_local_sgd", warmup=10**9),
}
KNOWN = Link(1e6, 0.1), 0.5, 1.0, True, 0


class FixedTuner:
    """Chooses what the test says, and keeps what it was told."""

    def __init__(self, settings, averaging_s=9.0, known=None, stops_at=9):
        self.seconds, self.stops_at, self.looks, self.measured, self.is_alone = averaging_s, stops_at, 0, None, False
        self.remembered = lambda *asked: setattr(self, "asked", asked) or known
        self.choose = lambda measured: settings
        self.planned, self.pass_steps, self.follow = (lambda: 60), (lambda: 30), (lambda loop: None)
        self.rates = lambda: (0.05,)

    def averages(self, measured):
        if not measured.step_s:
            return self.seconds < 1.5
        self.looks += 1
        return self.looks < self.stops_at

    def chosen(self, settings, measured, steps, is_first):
        self.measured, self.told = measured, (steps, is_first)

    def alone(self):
        self.is_alone = True


class Auto:
    """A replica with an attached loop."""

    def __init__(self, group, tuner):
        self.rank, self.tuner, self.model = group.rank, tuner, net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.loop = OuterLoop(self.model, "auto", group, chooser=RecipeTrial(tuner)).attach(self.optimizer)

    def train(self, first, last):
        for step in range(first, last):
            train(self.model, self.optimizer, step, self.rank)


def trained(group, name, averaging_s, stops_at=9, fewer=0):
    one = Auto(group, FixedTuner(CHOICES[name], averaging_s, stops_at=stops_at))
    one.train(0, 60 - fewer * group.rank)
    description = one.loop.state_dict()["description"]
    one.loop.close()
    return values(one.model), one.tuner.measured, description, one.loop.stats()


@pytest.mark.parametrize("averaging_s", [0.0, 9.0], ids=["averaged", "alone"])
@pytest.mark.parametrize("name", [name for name in CHOICES if name != "gradients"])
def test_all_ranks_continue_with_what_was_chosen_and_end_alike(name, averaging_s):
    weights, (measured, *others), descriptions, stats = zip(*run_replicas(trained, 3, name, averaging_s), strict=True)
    assert same(*weights)
    assert (measured.steps, measured.pass_steps) == (60, 30)
    assert measured.may_average == (averaging_s == 0)
    assert not measured.is_averaged  # the loop's own exchange is not part of the steps' seconds
    assert len(measured.step_s) == measured.replicas == 3
    assert others == [measured] * 2
    assert "TrialSchedule" not in descriptions[0]
    assert stats[0].rounds > (0 if name == "by time" else 4)


def test_a_run_has_the_steps_that_its_schedule_tells_after_the_first_update():
    def planned_once(group):
        tuner, loops = FixedTuner(CHOICES["diloco"]), []
        tuner.planned = lambda: 40 if loops and loops[0].position == 2 else None
        one = Auto(group, tuner)
        loops.append(one.loop)
        one.train(0, 30)
        state = one.loop.state_dict()
        one.loop.detach()
        tuner = FixedTuner(CHOICES["diloco"])
        tuner.planned = lambda: None
        again = Auto(group, tuner)
        again.loop.load_state_dict(state)
        again.loop.detach()
        return one.tuner.measured.steps, again.tuner.told[0]

    assert run_replicas(planned_once, 2) == [(40, 40)] * 2


def test_gradients_are_averaged_for_ever_where_that_is_chosen():
    weights, _, _, stats = zip(*run_replicas(trained, 2, "gradients", 0.0, 9, 7), strict=True)
    assert [one.steps for one in stats] == [60, 53]
    assert same(*weights)


@pytest.mark.law("every-wait-has-an-end-and-a-line")
@pytest.mark.parametrize("averaging_s", [0.0, 9.0], ids=["averaged", "alone"])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_rank_that_ends_its_pass_in_the_trial_stays_with_the_others(batches, averaging_s):
    def two_passes(group):
        one = Auto(group, FixedTuner(CHOICES["diloco"], averaging_s))
        first = batches if group.rank else 30
        one.train(0, first)
        one.loop.flush()
        assert (one.tuner.measured is None) == (one.loop.state_dict()["auto"] in ("", "averaged"))
        one.train(first, first + 30)
        one.loop.close()
        return values(one.model), one.tuner.measured

    weights, measured = zip(*run_replicas(two_passes, 3), strict=True)
    assert same(*weights)
    assert measured == measured[:1] * 3
    assert not measured[0].may_average


@pytest.mark.parametrize("name", ["diloco", "weights", "streaming"])
def test_what_trains_from_the_middle_of_the_trial_on_keeps_its_steps(name):
    def thaws(group):
        one = Auto(group, FixedTuner(CHOICES[name]))
        last = one.model[3].requires_grad_(False)
        for step in range(28):
            before = last.weight.clone()
            last.requires_grad_(step >= 5)
            one.train(step, step + 1)
            if step < 20:
                assert torch.equal(last.weight, before) == (step < 5), step
            elif step == 20:
                assert not torch.equal(last.weight, net()[3].weight)
        one.loop.close()
        return values(one.model)

    assert same(*run_replicas(thaws, 2))


def test_nets_that_train_in_turns_are_exchanged_alike_after_the_choice():
    def in_turns(group):
        one = Auto(group, FixedTuner(CHOICES["diloco"]))
        for step in range(45):
            for number, part in enumerate((one.model[0], one.model[3])):
                part.requires_grad_((step // 3 + group.rank) % 2 == number)
            one.train(step, step + 1)
        one.model.requires_grad_(True)
        one.loop.close()
        return values(one.model), one.loop.stats().rounds, one.tuner.measured.parameters

    weights, rounds, parameters = zip(*run_replicas(in_turns, 2), strict=True)
    assert same(*weights)
    assert rounds[0] > 2
    assert len(set(parameters)) == 1


def test_a_model_with_frozen_blocks_takes_the_choice():
    def adapted(group):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)), nn.Linear(3, 2))
        model[:4].requires_grad_(False)
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)
        loop = OuterLoop(model, "auto", group, chooser=RecipeTrial(tuner := FixedTuner(CHOICES["streaming"])))
        loop.attach(optimizer)
        for step in range(30):
            train(model, optimizer, step, group.rank)
        loop.close()
        return values(model), (tuner.measured.layers, tuner.measured.is_adapter)

    weights, measured = zip(*run_replicas(adapted, 2), strict=True)
    assert same(*weights)
    assert measured == ((2, True),) * 2


def averaged_steps(group, stops_at):
    one, sent = Auto(group, FixedTuner(CHOICES["diloco"], 0.0, stops_at=stops_at)), []
    for step in range(24):
        one.train(step, step + 1)
        sent.append(one.loop.stats().bytes_sent)
    ends = next(step for step in range(24) if sent[step] == sent[step - 1]) if stops_at < 9 else 24
    one.loop.close()
    return values(one.model), ends, one.tuner.measured.may_average, one.tuner.looks


@pytest.mark.parametrize("stops_at", [1, 3, 9], ids=["at once", "after a step that compiled", "never"])
def test_gradients_are_averaged_as_long_as_that_is_worth_it(stops_at):
    """The first step may take long for other reasons: it is asked after each of the first four."""
    weights, *figures = zip(*run_replicas(averaged_steps, 2, stops_at), strict=True)
    assert same(*weights)
    expected = (24, True) if stops_at == 9 else (stops_at, False)
    assert [*zip(*figures, strict=True)] == [(*expected, min(stops_at, 4))] * 2


def test_a_lost_packet_makes_no_line_slow_and_a_few_slow_steps_no_replica(monkeypatch):
    clock = threading.local()
    monkeypatch.setattr("farflung.auto.trial.time", SimpleNamespace(perf_counter=lambda: clock.s))

    def measured(group):
        plain, sizes, clock.s = group.all_gather, [], 0.0

        def all_gather(out, x):
            sizes.append(x.numel())
            is_first = x.numel() > 9999 and sum(size > 9999 for size in sizes) == 1  # it takes a second more
            clock.s += 8 * x.numel() / 1e8 + is_first
            return plain(out, x)

        group.all_gather = all_gather
        loop = OuterLoop(
            net(), "auto", group, chooser=RecipeTrial(tuner := FixedTuner(CHOICES["diloco"], averaging_s=0.0))
        )
        for took_s in (0.5, 0.5, *range(1, 19)):  # the first two don't count
            clock.s += took_s
            loop.count(done=took_s < 9)  # of a script that averages gradients itself, and skips steps
            loop.sync_if_due()
        return tuner.measured.link.bandwidth_bps, tuner.measured.step_s, tuner.measured.is_averaged

    assert run_replicas(measured, 2) == [(pytest.approx(1e8, 1e-3), pytest.approx((5.0, 5.0)), True)] * 2


@pytest.mark.filterwarnings("ignore:.*a round was dropped")
@on_replicas(2)
def test_under_the_chosen_recipe_values_that_are_not_finite_are_found(group):
    one = Auto(group, FixedTuner(CHOICES["weights"]))
    one.train(0, 21)
    if group.rank == 1:
        torch.nn.init.constant_(one.model[0].bias, torch.nan)
    one.train(21, 24)
    assert one.loop.stats().dropped_rounds == 1
    one.loop.detach()


@on_replicas(2)
def test_a_flush_among_averaged_steps_keeps_them(group):
    one = Auto(group, FixedTuner(CHOICES["diloco"], averaging_s=0.0))
    one.train(0, 5)
    before = [parameter.detach().clone() for parameter in one.model.parameters()]
    one.loop.flush()
    assert all(map(torch.equal, before, one.model.parameters()))


@on_replicas(2)
def test_the_steps_of_a_trial_without_averaging_count_in_the_first_round(group):
    """With one long round it is that of all steps."""
    one = Auto(group, FixedTuner(OuterSettings("slowmo", every=30, beta=0.0)))
    one.train(0, 30)
    assert same(values(one.model), Run(group, slowmo(30, beta=0.0)).steps(*range(30)))


@pytest.mark.parametrize("falls_on", [None, 0, 1])
def test_the_inner_rate_is_constant_if_it_is_on_each_rank(falls_on):
    def measured(group):
        tuner, seen = FixedTuner(CHOICES["diloco"]), iter(range(100))
        tuner.rates = lambda: (0.05, 0.1 - 0.001 * next(seen) * (group.rank == falls_on))
        one = Auto(group, tuner)
        one.train(0, 25)
        one.loop.close()
        return one.tuner.measured.is_rate_constant

    assert run_replicas(measured, 2) == [falls_on is None] * 2


def resumed(group, until):
    straight = Auto(group, FixedTuner(CHOICES["streaming"]))
    straight.train(0, until)
    state, moments = straight.loop.state_dict(), deepcopy(straight.optimizer.state_dict())
    again = Auto(group, FixedTuner(CHOICES["diloco"]))  # which would choose otherwise
    again.optimizer.load_state_dict(moments)
    again.loop.load_state_dict(state)
    schedule = again.loop.schedule
    for one in (straight, again):
        one.train(until, until + 10)
    return schedule, same(values(straight.model), values(again.model))


def test_a_resumed_loop_continues_with_what_was_chosen_bit_for_bit_or_with_its_trial():
    assert run_replicas(resumed, 2, 29) == [(Streaming(8, 2, 2), True)] * 2
    assert all(isinstance(schedule, TrialSchedule) for schedule, _ in run_replicas(resumed, 2, 11))


@on_replicas(2)
def test_what_an_earlier_start_measured_is_known_to_all_before_the_first_step(group):
    model, tuner = net(), FixedTuner(CHOICES["weights"], known=None if group.rank else KNOWN)
    model[0].requires_grad_(False)  # what is not trained does not count
    membership, rounds_s = FixedMembership(group, SoloGroup()), []
    membership.expect_round = rounds_s.append
    recipe = OuterConfig("auto", steps=50 + group.rank)
    assert OuterLoop(model, recipe, membership=membership, chooser=RecipeTrial(tuner)).schedule == Every(8)
    assert tuner.measured == Measurements(
        *KNOWN[:1], KNOWN[1:3], 2, 22, 3, 48, 1, 50, 30, True, False, True, True, True
    )
    assert (tuner.asked, tuner.told, rounds_s) == ((22, 2), (50 + group.rank, group.rank == 0), [8.0])


@on_replicas(2)
def test_what_the_user_has_set_holds_under_the_recipe_that_is_chosen(group):
    recipe = OuterConfig("auto", weigh_by="items", anchor_on_cpu=True)
    loop = OuterLoop(net(), recipe, group, chooser=RecipeTrial(FixedTuner(CHOICES["weights"], known=KNOWN)))
    loop.step(items=1)
    assert re.match(r"Every\(every=8\), .*by items", loop.state_dict()["description"])


def test_one_process_alone_has_nothing_to_choose_and_trains():
    one = Auto(SoloGroup(), FixedTuner(CHOICES["diloco"]))
    one.train(0, 45)
    one.loop.close()
    assert one.tuner.is_alone
    assert one.tuner.measured is None


def test_a_plain_loop_names_what_chooses_recipes():
    with pytest.raises(ConfigError, match=r"auto chooses a recipe for an Accelerator.*farflung plan"):
        OuterLoop(net(), "auto")


# ---- replicas that are lost, and islands


class AgreeingMembership(ChangingMembership):
    """Replicas that keep the first text that one of them gives."""

    def agreed(self, text, waits=True):
        door = door_of(self.group)
        door.text = getattr(door, "text", "") or text
        return door.text


def being_lost(group, fails_at, lost):
    """Train replicas of which one may be lost."""
    me, model = group.rank, net()
    fault = fail_at(None, fails_at if me == lost else 0, be_lost)
    membership = fault.membership(AgreeingMembership(group, [0, 1, 2]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        loop = OuterLoop(
            model, "auto", membership=membership, chooser=RecipeTrial(FixedTuner(CHOICES["diloco"]))
        ).attach(optimizer)
        while loop.position < 45:
            train(model, optimizer, loop.position, me)
        loop.close()
    except Lost:
        return None, fault.seen
    return values(model), loop.schedule


@pytest.mark.law("a-run-outlives-its-members")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_replica_may_be_lost_at_any_phase_of_a_trial(lost):
    """The line is measured, the times gathered, the recipe begun: the others choose, and end alike."""
    for at in range(1, 32, 1 if lost == 0 else 3):  # rank 0 chooses
        found = run_replicas(being_lost, 3, at, lost)
        assert found[lost][0] is None
        (first, schedule), (second, _) = [one for rank, one in enumerate(found) if rank != lost]
        assert schedule == Every(8), at
        assert same(first, second), at


def test_a_choice_that_a_checkpoint_brings_to_another_address_is_kept_there_for_newcomers():
    kept = []
    trial = RecipeTrial(FixedTuner(CHOICES["diloco"]))
    trial.first(
        chosen_recipe("auto"),
        SimpleNamespace(agreed=lambda text, waits=True: kept.append(text) or text, is_fixed=False),
    )
    trial.resumed({"auto": (spec := json.dumps({"recipe": "diloco", "every": 8}))})
    assert [trial.landed(), trial.landed(), trial.known()] == [None] * 3
    assert kept == ["", spec, ""]


@pytest.mark.law("a-run-outlives-its-members")
def test_a_trial_goes_on_while_the_store_gives_no_answer_and_asks_again():
    answers = iter(["", Unreachable("no answer"), Unreachable("no answer"), "", Unreachable("no answer"), "kept"])

    def agreed(text, waits=True):
        answer = next(answers)
        if isinstance(answer, Unreachable):
            assert not waits
            raise answer
        return answer

    trial = RecipeTrial(FixedTuner(CHOICES["diloco"]))
    trial.first(chosen_recipe("auto"), SimpleNamespace(agreed=agreed, is_fixed=False))
    trial.bind(net(), SimpleNamespace(group=SoloGroup()))
    assert [trial.landed() for _ in range(3)] == [None] * 3
    trial.resumed({"auto": json.dumps({"recipe": "diloco", "every": 8})})
    assert [trial.landed() for _ in range(3)] == [None] * 3
    assert not [*answers]


def in_islands(averaging_s):
    """Train as islands of two ranks, in shards and by DDP, and without islands."""
    made, grid = {}, Grid()
    for wrap in ("alone", "sharded", "in_step"):
        tuner = FixedTuner(CHOICES["weights"], averaging_s)
        run = IslandRun(grid, "auto", wrap, chooser=RecipeTrial(tuner))
        run.steps(*range(1, 40))
        run.outer.flush()
        made[wrap] = run.values(), run.outer.schedule, tuner.measured.island_size, tuner.measured.parameters
        run.outer.close()
    return made


@pytest.mark.long
@pytest.mark.law("islands-are-replicas")
@pytest.mark.parametrize("averaging_s", [0.0, 9.0], ids=["averaged", "alone"])
def test_islands_choose_as_replicas_of_one_rank_do(averaging_s):
    for made in run_ranks(in_islands, 4, averaging_s):
        for wrap in ("sharded", "in_step"):
            assert same(made[wrap][0], made["alone"][0]), wrap
            assert made[wrap][1:] == (Every(8), 2, made["alone"][3])


def chooses(pipe, place, folder, member, variables, step_s, numel, dies, recipe, steps, *_):
    """Train until enough others are there, and then for so many steps."""
    os.chdir(folder)
    transport, is_full = transport_at(*place), False
    elastic = Elastic(transport, member, grace_s=8.0)
    model, tuner, draw = net(), FixedTuner(CHOICES["diloco"]), torch.Generator().manual_seed(member)
    membership = fail_at(*dies or ("local step", 0)).membership(elastic)
    with OuterLoop(model, "auto", membership=membership, chooser=RecipeTrial(tuner)) as loop:
        pipe.send({"member": member, "joined": loop.position})
        while steps:
            there = len(elastic.record.ids)
            is_full |= there > numel or (there > 1 and transport.board.get("died") is not None)
            steps -= is_full
            time.sleep(step_s)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * torch.rand(parameter.shape, generator=draw)
            loop.step()
    end = [one.tolist() for one in model.parameters()]
    pipe.send({"member": member, "auto": loop.state_dict()["auto"], "end": end})


@pytest.mark.law("every-wait-has-an-end-and-a-line")
@pytest.mark.parametrize(
    "dies", [None, *(pytest.param(("exchange", k), marks=pytest.mark.long) for k in range(2, 14, 2))]
)
def test_replicas_that_come_and_go_choose_after_a_round_though_one_has_ended_or_dies(dies, tmp_path):
    with ElasticRun(address=tmp_path.as_uri(), play=chooses, folder=tmp_path, numel=1 + bool(dies)) as run:
        first = run.start(0, saves=5)  # it waits in its last flush as the others end the trial
        run.until(lambda: run.joined(first))
        members = [first, run.start(1, saves=45)]
        if dies:
            third = run.start(2, saves=35, dies=dies)
            run.until(lambda: run.has_ended(third) or run.has_ended(*members), 60.0)
            run.board.put("died", b"1")
        run.until(lambda: run.has_ended(*members), 60.0)
        run.until(lambda: sum("end" in one for one in list(run.said)) >= 2, 5.0)
        ends = [one for one in run.said if "end" in one and one["member"] in members]
    assert not [event for event in run.events if "late" in event]
    assert [(one["auto"], one["end"]) for one in ends] == [(ends[0]["auto"], ends[0]["end"])] * 2
    assert OuterSettings(**json.loads(ends[0]["auto"])) == CHOICES["diloco"]


def on_trial_at(address, steps=0):
    """A replica alone at an address, whose trial others end."""
    return saved_states.trained(address, "auto", steps, chooser=RecipeTrial(FixedTuner(CHOICES["diloco"])))


def choose_at(outer):
    settings = CHOICES["diloco"]
    outer._quorum.membership.agreed(json.dumps({"recipe": settings.recipe, **settings.given()}))


@pytest.mark.law("a-run-outlives-its-members")
def test_a_run_continues_though_all_have_died_after_the_choice_and_before_the_next_state(tmp_path):
    address = tmp_path.as_uri()
    outer, member = on_trial_at(address, 21)
    choose_at(outer)
    saved_states.kill(outer, member, address)
    again, _ = on_trial_at(address)
    assert (again.position, again.schedule) == (20, Every(8))
    saved_states.step(again, 9)
    again.close()
    assert again.stats().rounds > 0


@pytest.mark.law("a-run-outlives-its-members")
def test_a_replica_that_is_refused_on_its_way_back_after_the_choice_asks_with_that(tmp_path):
    """As one that was stopped for longer than the grace in the choice's last collective."""
    outer, _ = on_trial_at(tmp_path.as_uri(), 21)
    choose_at(outer)
    membership, asked, fails = outer._quorum.membership, [], [True]
    enter = membership.enter

    def is_lost_once():
        if fails:
            fails.clear()
            raise RankFailure("a test")

    def refuses_trials(needs):
        asked.append("Trial" in needs.description)
        if asked[-1]:
            raise ConfigError("This replica can't join the run: its outer loop is another one.")
        return enter(needs)

    membership.enter = refuses_trials
    outer._quorum.run(is_lost_once)
    assert asked == [True, False]
    assert outer.schedule == Every(8)
    saved_states.step(outer, 9)
    outer.close()
