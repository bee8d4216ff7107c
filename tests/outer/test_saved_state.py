# SPDX-License-Identifier: Apache-2.0
"""A run outlives its members: the state at its address, what it is good for, and what damages it."""

import os
import random
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from farflung.address import board as board_module
from farflung.address.board import Log
from farflung.address.c10d_transport import PATIENCE_S
from farflung.address.member_store import LauncherNotes, MemberStore, Record
from farflung.address.packed import Damaged
from farflung.address.reader import Reader
from farflung.address.saved_state import Saved, SavedStates
from farflung.address.schemes import transport_at
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.exchanged import bound
from farflung.members.elastic import Elastic
from farflung.members.saver import Saver
from farflung.outer import OuterLoop, diloco, local_sgd, streaming_diloco
from farflung.testing.ranks import run_ranks
from tests.errors import error_of
from tests.outer.elastic_run import EVERY, ElasticRun, wrong
from tests.outer.replicas import same, shift, values

RECIPE, LATE = diloco(4, lr=1.0, momentum=0.5), streaming_diloco(4, 1, delay=1, lr=1.0, momentum=0.0)
TREE = {
    "place": {"position": 3, "due": []},
    "0": {"a": torch.arange(5.0), "b": [torch.ones(2, 3).bfloat16(), (1, None)]},
}


@pytest.fixture(params=["folder", *(pytest.param(one, marks=pytest.mark.long) for one in ("bucket", "hub"))])
def board(request, tmp_path):
    address = tmp_path.as_uri() if request.param == "folder" else request.getfixturevalue(request.param)
    return transport_at(address).board.part("loop1")


@pytest.fixture
def address_here(tmp_path, monkeypatch):
    """The address of a run in a folder in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return (tmp_path / "run").as_uri()


def saved(name, ranks=1):
    return Saved(name, 3, ranks, tuple(TREE))


def test_a_state_comes_back_with_its_bits_and_the_last_two_are_kept(board):
    states = SavedStates(board)
    for name in ("1.10", "1.20", "2.30"):
        for rank in range(2):
            states.write(name, rank, TREE)
        states.finish(saved(name, 2))
    assert states.finish(saved("2.30", 2))  # the log has it already
    assert [one.name for one in states.newest()] == ["2.30", "1.20"]
    assert {key.split("/")[1] for key in board.list("state/")} == {"2.30", "1.20"}
    found = states.read(next(states.newest()), 1)
    assert found["place"] == TREE["place"]
    assert torch.equal(found["0"]["a"], TREE["0"]["a"])
    tensor, rest = found["0"]["b"]
    assert (tensor.dtype, tensor.tolist(), rest) == (torch.bfloat16, [[1.0] * 3] * 2, (1, None))
    with pytest.raises(Unreachable, match="have not written their parts of it within 0 s"):
        states.finish(saved("2.40", 1), within_s=0)
    saver = Saver(board, board, Exchange(SoloGroup()), 1)
    assert saver.tensors().keys() == {"0.a", "0.b.0"}
    board.delete("state/2.30/1/0")
    with pytest.raises(Damaged, match=r"state/2\.30/1/0 is not there"):
        states.read(next(states.newest()), 1)
    assert saver.found().name == "1.20"
    board.put("g0/landings", b"3")
    assert saver.num_lost(replace(saved("1.20"), parts=("place", "0", "1"))) == 2
    board.delete("state/2.30/0/0")
    assert saver.given("1.20")["place"] == TREE["place"]
    for name, why in ("1.10", ""), ("2.30", "state/2.30/0/0 is not there"):
        assert error_of(RankFailure, saver.given, name) == f"the state {name} can't be read: {why}"


def test_what_other_ranks_have_written_of_the_next_state_stays(board):
    states = SavedStates(board)
    states.write("1.20", 1, TREE)  # this rank is ahead
    for rank in range(2):
        states.write("1.10", rank, TREE)
    states.finish(saved("1.10", 2))
    states.write("1.20", 0, TREE)
    states.finish(saved("1.20", 2))
    assert [one.name for one in states.newest()] == ["1.20", "1.10"]
    assert states.read(next(states.newest()), 1)["place"] == TREE["place"]


def test_what_a_killed_replica_had_asked_for_does_not_stay_beside_the_state_that_is_continued(board):
    name = "data/0/epochs"
    assert Log(board, name).append(0, b"known to the state")

    def is_still_due():  # meanwhile an older request is carried out
        Log(board, name).append(1, b"of a round that is lost")
        return True

    saver = Saver(board, board, Exchange(SoloGroup()), 1)
    saver.restore_logs(replace(saved("1.10"), logs={name: "known to the state"}), is_still_due)
    assert Log(board, name).last() == (3, b"known to the state")
    saver.restore_logs(replace(saved("1.10"), logs={name: "too late"}), lambda: False)
    assert Log(board, name).last() == (3, b"known to the state")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content[:-3],
        lambda content: content.replace(b"[5]", b"[6]"),
        lambda content: content.replace(b"[5]", b"[9999999999999]"),
        lambda content: content.replace(b"[5]", b"[-5]"),
        lambda content: content.replace(b'"float32"', b'"typing"'),
        lambda content: b"{}",
    ],
    ids=["bit", "short", "longer", "huge", "negative", "dtype", "none"],
)
def test_a_damaged_part_is_never_taken(board, change):
    states = SavedStates(board)
    states.write("1.10", 0, TREE)
    states.finish(saved("1.10"))
    board.put("state/1.10/0/0", change(board.get("state/1.10/0/0")))
    with pytest.raises(Damaged):
        states.read(next(states.newest()), 0)


def pulled(address, folder):
    """The weights in the newest state at an address, by way of a file."""
    Reader(address).newest().save(folder / "pulled.safetensors")
    return load_file(folder / "pulled.safetensors")


def lost():
    raise RankFailure("a test")


def unreachable(*_):
    raise Unreachable("no more disk")


def trained(place, recipe, steps, model=None, logs=(), state_every=2, **options):
    """Train a replica that moves by -1 in each step, as if its process ended afterwards; return its loop and its id."""
    transport = transport_at(place) if isinstance(place, str) else place
    member = LauncherNotes(transport.board).enroll("replica")
    membership = Elastic(transport, member, grace_s=5.0, state_every=state_every)
    membership.keep_logs(logs, lambda value: (int(value), 0))
    outer = OuterLoop(model or nn.Linear(3, 2), recipe, membership=membership, **options)
    step(outer, steps)
    return outer, member


def step(outer, steps):
    """Train on, at the pace at which states are written."""
    saver = outer._quorum.membership.saver
    for _ in range(steps):
        shift(filter(lambda one: one.requires_grad, outer._model.parameters()), -1)
        outer.step()
        for task in filter(None, (saver._saving, saver._noting)):
            task.result()


def kill(outer, member, address):
    LauncherNotes(transport_at(address).board).note_end(member, "killed")
    outer._quorum.free(reusable=False)


@pytest.mark.law("a-run-outlives-its-members")
@pytest.mark.parametrize("damage", [False, True])
def test_replicas_that_begin_when_all_have_died_go_on_from_the_newest_state_that_is_whole(tmp_path, damage):
    address, logs = tmp_path.as_uri(), ["data/0/epochs"]
    notes = LauncherNotes(transport_at(address).board)
    slots = Log(notes.board, *logs)
    assert slots.append(0, b"1")
    outer, member = trained(address, RECIPE, 9, logs=logs)
    anchor = [chunk.clone() for chunk in outer._rounds.replica.fragments[0].weights.rows()["anchor"]]
    assert slots.append(1, b"2")
    step(outer, 4)
    kill(outer, member, address)
    states = SavedStates(notes.board.part("loop1"))
    assert [one.position for one in states.newest()] == [12, 8]
    if damage:
        key = f"loop1/state/{next(states.newest()).name}/0/0"
        notes.board.put(key, notes.board.get(key)[:-1] + b"?")
    notes.receive()
    again, _ = trained(address, RECIPE, 0, logs=logs)
    assert (again.position, again.is_newcomer) == ((8 if damage else 12), True)
    found = again._rounds.replica.fragments[0].weights.rows()["anchor"]
    assert not damage or all(map(torch.equal, found, anchor))
    assert slots.last()[1] == b"1"
    told = "\n".join(map(str, notes.receive()))
    lost = "1 later round lost" if damage else "no round lost"
    assert f"training continues with 1 replica from the state at step {again.position}, {lost}" in told
    assert told.count("the state at step 12 is damaged (its checksum shows that it is damaged)") == damage
    again._quorum.membership.saver.found()  # as replicas do that wait for each other
    assert "damaged" not in "\n".join(map(str, notes.receive()))
    step(again, 1)
    assert not again.is_newcomer
    again.close()
    with pytest.raises(Exception, match="The run has ended"):
        trained(address, diloco(4), 0)


@pytest.mark.law("a-run-outlives-its-members")
def test_logs_stay_as_they_are_where_another_decision_than_to_continue_from_a_state_was_recorded(tmp_path, monkeypatch):
    address, logs = tmp_path.as_uri(), ["data/0/epochs"]
    slots = Log(transport_at(address).board, *logs)
    assert slots.append(0, b"1")
    outer, member = trained(address, RECIPE, 9, logs=logs)
    assert slots.append(1, b"2")
    kill(outer, member, address)
    append = MemberStore.append

    def overtaken(store, record):
        monkeypatch.setattr(MemberStore, "append", append)
        assert store.append(replace(record, by=7, ids=(7,), saved=""))
        seen.append(slots.last()[1])
        raise Unreachable("a decision was recorded by another member")

    seen = []
    monkeypatch.setattr(MemberStore, "append", overtaken)
    with pytest.raises(Exception, match="a decision was recorded"):
        trained(address, RECIPE, 0, logs=logs)
    assert seen == [b"2"]


def test_a_line_counts_the_rounds_since_the_last_state_though_a_generation_that_made_none_came_after(tmp_path):
    outer, member = trained(tmp_path.as_uri(), RECIPE, 13)
    membership = outer._quorum.membership
    state = next(membership.saver._states.newest())
    membership.saver._since = 3
    membership._note_entry(membership.record)
    assert membership.saver.num_lost(state) == 3
    kill(outer, member, tmp_path.as_uri())


def test_a_state_is_whole_though_a_listing_does_not_show_its_last_part_yet(board, monkeypatch):
    states = SavedStates(board)
    for rank in range(4):
        states.write("1.10", rank, TREE)
    listed = type(board).list
    monkeypatch.setattr(type(board), "list", lambda board, prefix: [*listed(board, prefix)][:-1])
    assert states.is_whole(saved("1.10", 4))


def test_a_state_that_can_not_be_written_is_written_after_the_next_round_and_a_line_says_so(tmp_path, caplog):
    outer, _ = trained(tmp_path.as_uri(), diloco(4), 1)
    saver = outer._quorum.membership.saver
    saver._every, write, saver._states.write = 2, saver._states.write, unreachable
    step(outer, 3)
    assert "The state at step 4 was not written: no more disk" in caplog.text
    saver._states.write = write
    step(outer, 4)
    assert [one.position for one in saver._states.newest()] == [8]
    outer.close()


def test_a_state_that_takes_too_long_to_write_is_reported_once(tmp_path, caplog):
    outer, _ = trained(tmp_path.as_uri(), diloco(4), 4)
    outer._quorum.membership.saver._saving = SimpleNamespace(is_over=False, result=lambda: None)
    step(outer, 4)
    assert "takes longer" not in caplog.text
    step(outer, 4)
    step(outer, 8)
    why = "A state of this run takes longer to write than 1 round, so more than 2 are lost if all replicas die. "
    assert caplog.messages == [why + "Give --state_every a larger number."]
    outer.close()


def test_states_that_take_long_to_write_are_written_in_a_tenth_of_the_time(tmp_path, caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("farflung.members.saver.time", SimpleNamespace(monotonic=lambda: now[0]))
    outer, _ = trained(tmp_path.as_uri(), diloco(4), 0, state_every=None)
    saver = outer._quorum.membership.saver
    write, written = saver._states.write, []

    def slow(name, *arguments):
        written.append(int(name.split(".")[1]))
        now[0] += 30.0
        write(name, *arguments)

    saver._states.write = slow
    for _ in range(30):
        now[0] += 10.0  # of a round
        step(outer, 4)
    assert written == [4, 4 * 28]  # of a state's 270 s of rest 27 rounds take all
    why = "takes 30 s to write, so one is written every 300 s and not every 5 rounds. "
    assert caplog.messages == [f"A state of this run {why}Give --state_every to lose less if all replicas die."]
    outer.close()


@pytest.mark.law("a-run-outlives-its-members")
def test_where_the_address_is_gone_the_state_lies_here_and_a_run_can_go_on_with_it(address_here, tmp_path):
    outer, _ = trained(address_here, RECIPE, 9)
    membership = outer._quorum.membership
    membership.peers.members.board = membership.peers.members.board.patient(0)
    (tmp_path / "run").rename(tmp_path / "away")
    why = r"No such file(.|\n)* lies in \S+, from step 8. Continue with --meet"
    with pytest.raises(RankFailure, match=why) as failed:
        outer._quorum.run(lambda: membership.lost(RankFailure("a test")))
    where = re.search(r"--meet (\S+),", str(failed.value))[1]
    with pytest.raises(ConfigError, match="the run alone has bias float32"):
        trained(where, RECIPE, 0, nn.Linear(3, 2, bias=False))
    again, _ = trained(where, RECIPE, 0)
    rows = [one._rounds.replica.fragments[0].weights.rows()["anchor"] for one in (outer, again)]
    assert all(map(torch.equal, *rows))
    assert again.position == 8
    again.close()


@pytest.mark.parametrize("address", ["folder", pytest.param("bucket", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("deletes", [True, False], ids=["deleted", "begun beside"])
def test_a_replica_whose_run_was_begun_again_by_others_keeps_its_state_and_ends(
    address, tmp_path, monkeypatch, deletes
):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    root = transport_at(address)
    outer, _ = trained(root.of_run(b"{}"), RECIPE, 9)
    root.board.delete(*(root.board.list("") if deletes else ["run"]))
    root.board.put("run", b'{"in": "run-00000000"}')
    there = set(root.board.list("run-00000000/"))
    outer._quorum.membership._look_at = outer._quorum.membership._check_at = 0.0
    with pytest.raises(RankFailure, match=r"Another run has begun in (.|\n)* lies in \S+, from step 8. Continue with"):
        step(outer, 3)
    assert list((tmp_path / "cwd").glob("farflung-state-*"))
    assert set(root.board.list("run-00000000/")) == there


def test_one_that_waits_to_join_a_run_that_others_have_begun_again_ends(tmp_path):
    root = transport_at(tmp_path.as_uri())
    run = root.of_run(b"{}")
    root.board.put("run", b'{"in": "run-00000000"}')
    with pytest.raises(RankFailure, match="Another run has begun in "):
        trained(run, diloco(4), 0)


def leave(outer):
    """End as its process would that is asked to."""
    outer._leaving.leave = lambda: None
    outer._leave_after_a_round(outer._leaving)


@pytest.mark.parametrize(
    ("act", "recipe"), [("end", RECIPE), ("end", LATE), (ValueError, RECIPE), (KeyboardInterrupt, RECIPE)]
)
def test_a_lone_replica_that_is_asked_to_end_or_fails_leaves_its_newest_state(tmp_path, act, recipe):
    """A run of one that trained to step 12 begins again there, as if nobody had stopped it."""
    address = tmp_path.as_uri()
    outer, member = trained(address, recipe, 4)
    outer._quorum.membership.saver._every = 100  # so that no other state is due
    step(outer, 7 if act == "end" else 9)
    leave(outer) if act == "end" else outer.__exit__(act, act("a test"), None)
    why = "was asked to end, and did so after a round" if act == "end" else "its loop has ended"
    assert LauncherNotes(transport_at(address).board).why_left(member) == why
    again, _ = trained(address, recipe, 0)
    assert again.position == (11 if act == "end" else 12)
    if act == "end":  # what is late is blended into the weights, which rounds
        torch.testing.assert_close(values(again._model), values(outer._model))
    told = "\n".join(map(str, LauncherNotes(transport_at(address).board).receive()))
    assert f"from the state at step {again.position}, no round lost" in told
    if act == "end":  # again, soon after, and no round was due in between
        step(again, 1)
        leave(again)
        again, _ = trained(address, recipe, 0)
        assert again.position == 12
    again.close()


def ends(pipe, place, folder, member, variables, step_s, numel, dies, *_):
    """Train a replica, which may die once the last state is written, and before it counts."""
    os.environ.update(variables)
    finish = SavedStates.finish

    def finish_or_die(states, saved, *args):
        if saved.is_last and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(states, saved, *args)

    SavedStates.finish = finish_or_die
    outer = OuterLoop(nn.Linear(3, 2), diloco(4, lr=1.0), membership=Elastic(transport_at(*place), member, expected=2))
    step(outer, 6)
    outer.close()
    pipe.send({"end": outer.position, "member": member})


@pytest.mark.law("a-run-outlives-its-members")
@pytest.mark.parametrize("dying", [[0], [1], []])
def test_where_the_first_member_dies_as_it_writes_the_last_state_the_next_one_writes_it(tmp_path, dying):
    with ElasticRun(address=tmp_path.as_uri(), play=ends) as run:
        members = [run.start(name, dies=name in dying) for name in range(2)]
        run.until(lambda: run.has_ended(*members))
        record = MemberStore(run.board.part("loop1")).record()
        newest = next(SavedStates(run.board.part("loop1")).newest())
    assert (newest.position, newest.is_last) == (6, True)
    assert sum(code == 0 for code in run.codes.values()) == 2 - (members.index(record.ids[0]) in dying)


@pytest.mark.parametrize("moment", ["before its first part", "before it is recorded"])
def test_a_state_of_a_replica_that_was_excluded_as_it_wrote_is_not_taken(board, moment):
    states, is_early = SavedStates(board), moment == "before its first part"
    states.write("2.30.a", 0, TREE)
    assert states.finish(saved("2.30.a"), lambda: True)
    states.write("1.4.b", 0, TREE, lambda: not is_early)
    assert not (is_early and any("1.4.b" in key and "/done" not in key for key in board.list("state/")))
    assert not states.finish(saved("1.4.b"), lambda: not is_early)  # even where it is not known to be out
    assert [one.name for one in states.newest()] == ["2.30.a"]
    states.write("3.2.c", 0, TREE)
    assert not states.finish(saved("3.2.c"), lambda: False)
    assert {key.split("/")[1] for key in board.list("state/")} == {"2.30.a"}


def test_what_has_stopped_training_is_pulled_too_and_continues_where_it_was(tmp_path):
    address, model = tmp_path.as_uri(), Swapped("a", "b")
    outer, member = trained(address, diloco(4, lr=1.0, momentum=0.0), 4, model)
    model.a.requires_grad_(False)
    step(outer, 12)
    held = {name for fragment in outer._rounds.replica.fragments for name in fragment.comparison.names}
    assert held == {"b.weight", "b.bias"}
    assert outer.state_dict()["rounds"]["trained"]["rest"].keys() == {"a.weight", "a.bias"}
    found = pulled(address, tmp_path)
    assert found.keys() == model.state_dict().keys()
    assert torch.equal(found["a.weight"], model.a.weight)
    kill(outer, member, address)
    again, _ = trained(address, diloco(4, lr=1.0, momentum=0.0), 0, Swapped("a", "b"))
    assert torch.equal(again._model.a.weight, model.a.weight)


class Swapped(nn.Module):
    """Layers of one shape in an order; those whose names are capital letters are frozen."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name.lower(), nn.Linear(3, 3).requires_grad_(name.islower()))


@pytest.mark.parametrize(
    ("recipe", "names", "options", "says"),
    [
        (diloco(4), "ac", {}, "the run alone has b.bias"),
        (local_sgd(4), "ab", {}, "outer loop is "),
        (diloco(8), "ab", {}, "every=8"),
        (diloco(4), "ab", {"bucket_bytes": 16}, "buckets of 16 bytes"),
    ],
    ids=["names", "recipe", "schedule", "buckets"],
)
def test_one_that_continues_is_compared_as_one_that_joins(address_here, recipe, names, options, says):
    kill(*trained(address_here, diloco(4), 9, Swapped("a", "b")), address_here)
    with pytest.raises(ConfigError, match=f"This replica can't join the run: .*{says}"):
        trained(address_here, recipe, 0, Swapped(*names), **options)
    again, _ = trained(address_here, diloco(4), 0, Swapped("a", "b"))
    assert again.position == 8
    again.close()


@pytest.mark.parametrize("names", ["ba", "Ab"], ids=["order", "frozen"])
def test_one_that_continues_exchanges_what_the_run_does_whatever_it_would_by_itself(address_here, names):
    kill(*trained(address_here, diloco(4), 9, Swapped("a", "b")), address_here)
    models = Swapped("a", "b"), Swapped(*names)
    for model in models:
        again, member = trained(address_here, diloco(4), 0, model)
        assert again.position == 8
        kill(again, member, address_here)
    assert same(*map(values, models))


@pytest.mark.parametrize(
    ("recipe", "given", "here"),
    [(diloco(4), [24], [4, 4, 4, 4, 4]), (local_sgd(4), [9, 3, 9, 3], [4, 4, 1, 3, 4])],
    ids=["diloco", "local_sgd"],
)
def test_a_version_that_cuts_weights_otherwise_does_not_copy_them_by_position(
    address_here, monkeypatch, recipe, given, here
):
    kill(*trained(address_here, recipe, 9, Swapped("a", "b")), address_here)
    cut = bound.buckets_of
    monkeypatch.setattr(bound, "buckets_of", lambda places, cap_bytes, *others: cut(places, 16, *others))
    with pytest.raises(ConfigError, match=re.escape(f"{given} values, and so on, here it would be {here}.")):
        trained(address_here, recipe, 0, Swapped("a", "b"))


@pytest.mark.parametrize("is_same", [True, False])
def test_frozen_weights_that_are_not_those_of_the_state_are_named(address_here, caplog, is_same):
    model, again = Swapped(*"ACDb"), Swapped(*"ACDb")
    kill(*trained(address_here, diloco(4), 9, model), address_here)
    if is_same:
        again.load_state_dict(model.state_dict())
    trained(address_here, diloco(4), 0, again)[0].close()
    why = (
        "The state at step 8 was written with other values of frozen weights: a.weight, a.bias, c.weight, c.bias, "
        "d.weight, and more. It contains only what is trained. Start with the run's frozen weights; if your script "
        "changes them, load them from a checkpoint."
    )
    assert caplog.messages == [] if is_same else [why]


@pytest.mark.parametrize("door", ["_next", "agree"])
def test_the_state_is_kept_at_whichever_door_the_address_is_found_gone(address_here, tmp_path, monkeypatch, door):
    seal = Seal(bytes(32))
    outer, _ = trained(transport_at(address_here, seal=seal), RECIPE, 9)
    membership = outer._quorum.membership
    membership.peers.members.board = membership.peers.members.board.patient(0)
    monkeypatch.setattr(type(membership), door, unreachable)
    act = partial(outer._quorum.run, lost) if door == "agree" else outer._quorum.enter
    assert re.search(r"lies in \S+, from step 8. Continue with --meet", error_of(RankFailure, act))
    (kept,) = tmp_path.glob("farflung-state-*")
    states = SavedStates(transport_at(kept.as_uri(), seal=seal).board.part("loop1"))
    assert next(states.newest()).position == 8


def test_a_last_state_that_can_not_be_written_is_kept_here(address_here, caplog):
    outer, member = trained(address_here, diloco(4), 9)
    saver, needs = outer._quorum.membership.saver, outer._quorum.needs
    saver._states.write = unreachable
    outer.close()
    kept, file = (Path(f"farflung-state-{one}").absolute() for one in (member, member + 1))
    assert caplog.messages[-1] == (
        f"The shared state of the replicas lies in {kept}, from step 9. Continue with --meet {kept.as_uri()}, where "
        "only replicas that can use this folder take part, or get the weights by `farflung checkpoint pull "
        f"{kept.as_uri()} model.safetensors`."
    )
    file.touch()
    why = f"The shared state of the replicas could not be written to {file} either: [Errno 17] File exists"
    assert saver.keep_here(member + 1, needs).startswith(why)


@pytest.mark.parametrize(("wrote", "is_first"), [(False, True), (True, True), (True, False)])
def test_a_last_state_whose_loop_has_vanished_is_kept_here(address_here, monkeypatch, caplog, wrote, is_first):
    """Nobody ends well with the result nowhere, whatever this replica had read of the records before."""
    monkeypatch.setattr(board_module, "_LATE_S", 0.1)
    outer, member = trained(address_here, diloco(4), 9 if wrote else 3)
    membership, board = outer._quorum.membership, transport_at(address_here).board
    membership._look_at = float("inf")  # it looked a moment ago
    if not is_first:  # the first one has written the state that vanishes then, and its work is done
        membership.peers.record = Record(2, 7, (7, member))
        LauncherNotes(board).put("left", 7, "done")
    board.delete(*board.list("loop1/"))
    outer.close() if is_first else membership.end("")
    assert re.search(rf"have vanished(.|\n)* lies in \S+, from step {outer.position if is_first else 8}\.", caplog.text)


def in_shards(address, member, every, patience_s=PATIENCE_S, state_every=100):
    """The loop of a replica of two ranks."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    membership = Elastic(transport_at(address, patience_s), member, state_every=state_every, island=TorchGroup())
    return OuterLoop(model, diloco(every, lr=1.0, momentum=0.0), membership=membership)


def whole(outer):
    return {name: x.full_tensor() for name, x in outer._model.state_dict().items()}


def stranded_in_shards(address, member):
    """Train a replica of two ranks until its address is gone; return why it ends."""
    outer = in_shards(address, member, 2, 0.0)
    for _ in range(5):
        outer.step()
    if dist.get_rank() == 0:
        os.rename("run", "away")
    dist.barrier()
    return error_of(RankFailure, outer._quorum.enter), whole(outer)


def test_a_replica_of_several_ranks_keeps_its_state_too_if_the_address_is_gone(address_here, tmp_path):
    member = LauncherNotes(transport_at(address_here).board).enroll("replica")
    (why, weights), (again, _) = run_ranks(stranded_in_shards, 2, address_here, member)
    assert again == why
    where = re.search(r"lies in \S+, from step 4. Continue with --meet (\S+),", why)[1]
    assert same(pulled(where, tmp_path), weights)


def preempted_in_shards(address, member, heard_by, number):
    """Train a replica of two ranks that drift apart, until some get a signal; return where each has ended, and why."""
    outer = in_shards(address, member, 100)
    outer._leaving.leave = lambda: None
    pace = random.Random(dist.get_rank())
    while outer._open and outer.position < 5000:
        time.sleep(pace.random() * 0.002)
        if outer.position == 130 + 10 * dist.get_rank() and dist.get_rank() in heard_by:
            os.kill(os.getpid(), number)
        outer.step()
    return outer.position, whole(outer)


@pytest.mark.parametrize(
    ("heard_by", "number"), [([0], signal.SIGTERM), ([1], signal.SIGUSR1), ([0, 1], signal.SIGTERM)]
)
def test_ranks_that_are_asked_to_end_leave_their_replica_at_one_step_with_its_state(tmp_path, heard_by, number):
    address = tmp_path.as_uri()
    notes = LauncherNotes(transport_at(address).board)
    member = notes.enroll("replica")
    (position, weights), (again, _) = run_ranks(preempted_in_shards, 2, address, member, heard_by, number)
    assert position == again
    assert 130 <= position < 5000
    assert next(one.position for one in SavedStates(notes.board.part("loop1")).newest()) == position
    assert same(pulled(address, tmp_path), weights)
    assert notes.why_left(member) == "was asked to end, and did so after a round"


def failing_in_shards(address, failing):
    """Train a replica of two ranks, of which one fails; return what each ends with."""
    try:
        with in_shards(address, 1, 2) as outer:
            for number in range(8):
                if number == 5 and dist.get_rank() == failing:
                    raise ValueError("a test")
                outer.step()
    except (ValueError, RankFailure) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_waits_for_no_other_and_the_last_one_finishes_their_state(tmp_path, failing):
    notes = LauncherNotes(transport_at(tmp_path.as_uri()).board)
    notes.enroll("replica")
    ends = run_ranks(failing_in_shards, 2, tmp_path.as_uri(), failing)
    assert ends[failing] == "a test"
    assert f"rank {failing} " in ends[1 - failing]
    assert [one.position for one in SavedStates(notes.board.part("loop1")).newest()] == [4, 2]


@pytest.mark.law("a-run-outlives-its-members")
@pytest.mark.parametrize(
    ("recipe", "address", "times"),
    [
        (diloco(EVERY, lr=1.0, momentum=0.0), "folder", 4),
        (streaming_diloco(EVERY, 2, delay=1, lr=1.0, momentum=0.0, alpha=0.0), "folder", 3),
        pytest.param(diloco(EVERY, lr=1.0, momentum=0.0), "bucket", 10, marks=pytest.mark.long),
        pytest.param(diloco(EVERY, lr=1.0, momentum=0.0), "hub", 3, marks=pytest.mark.long),
    ],
    indirect=["address"],
    ids=["folder", "streaming", "bucket", "hub"],
)
def test_all_may_be_killed_at_any_moment_and_started_again(address, recipe, times):
    every = 8
    options = {"address": address, "expected": 2, "grace_s": 20.0, "state_every": every, "recipe": recipe}
    with ElasticRun(**options) as run:
        reached = 0
        for number in range(times):
            members = [run.start(name) for name in range(2)]
            run.until(lambda members=members: run.joined(*members))
            begun = min(one["joined"] for one in run.said if one.get("member") in members and "joined" in one)
            assert reached // EVERY - begun // EVERY <= 2 * every  # twice, as a busy machine may write slowly
            run.until(lambda begun=begun, number=number: run.at(begun + 7 + 9 * number))
            reached = max(one.get("position", 0) for one in list(run.said))
            run.kill(*members)
        last = [run.start(name) for name in range(2)]
        run.until(lambda: run.joined(*last))
        said = run.finish()
        assert recipe.schedule.delay or not wrong(said)
        assert len({str(one["weight"]) for one in said if "end" in one}) == 1
        continued = sum("training continues with 2 replicas from the state at step" in event for event in run.events)
        assert continued >= times - 1  # the first two may be killed before any state is there


@pytest.mark.law("a-run-outlives-its-members")
def test_a_newcomer_whose_only_giver_dies_continues_from_the_state_at_the_address(tmp_path):
    with ElasticRun(address=tmp_path.as_uri(), state_every=2) as run:
        giver = run.start(0, dies=("admission", 1))
        run.until(lambda: run.joined(giver) and next(SavedStates(run.board.part("loop1")).newest(), None))
        comes = run.start(1)
        run.until(lambda: run.has_ended(giver) and run.joined(comes), 60.0)
        newest = next(SavedStates(run.board.part("loop1")).newest())
        said = run.finish()
    (begun,) = [one["joined"] for one in said if one["member"] == comes and "joined" in one]
    assert begun >= newest.position > 0
    assert not wrong(said)
