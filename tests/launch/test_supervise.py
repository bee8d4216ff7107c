# SPDX-License-Identifier: Apache-2.0
"""What a launcher does when processes of replicas end. They are lines of a shell, and the test writes their records."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest

from farflung.address import member_store
from farflung.address.c10d_transport import C10dTransport
from farflung.address.saved_state import Saved, SavedStates
from farflung.address.schemes import transport_at
from farflung.base.causes import Cause
from farflung.base.events import FILES_ONLY, Event, Kind, Sink
from farflung.config.launch import LaunchSettings
from farflung.launch import replicas, supervisor
from farflung.launch.codes import DONE, ENGINE, FAILED, HUNG, OF_REPLICAS
from farflung.launch.events import showing
from farflung.process.identity import address_of
from tests.outer.elastic_run import served
from tests.waits import until

SCRIPT = ["sh", "-c", 'until [ -e "do$FARFLUNG_MEMBER" ]; do sleep 0.01; done; . "./do$FARFLUNG_MEMBER"']
START = partial(replicas.started, SCRIPT)
WAITS = "until [ -e go ]; do sleep 0.01; done"
MET, ITS_DONE = {"in": "1"}, {"in": "1", "left": member_store.DONE}
ASKED = {"in": "1", "left": member_store.ASKED}


def reporting(message: str, cause: str) -> str:
    report = {"message": {"message": message, "extraInfo": {"py_callstack": "T", "cause": cause}}}
    return f"printf '{json.dumps(report)}' > $TORCHELASTIC_ERROR_FILE; exit 1"


REPORTS = reporting("RankFailure: no answer", "late")
WRONG = reporting("ConfigError: replicas 0 and 1 see the same batches", "wrong_use")
MISSING = reporting("ModuleNotFoundError: no wandb", "missing")

FINISHED = (
    "the run at file:///x has finished its work. Begin another at an address of its own; `farflung checkpoint pull"
)
PASS = "Pass membership=launched_membership() to an OuterLoop of your own"


class Lab(Sink):
    """A launcher called `mine`, of replicas that are pairs of a line and its records; and the launcher's events."""

    def __init__(self, transport) -> None:
        super().__init__(FILES_ONLY)
        self.transport, self.board, self.pids = transport, transport.board, dict[int, int]()  # by member
        self.notes, self.has_started = member_store.LauncherNotes(self.board), lambda: None

    def show(self, event: Event) -> None:
        self.events.append(event)
        if event.kind is Kind.PROCESS:
            member, (line, records) = event.facts["member"], self.pairs[len(self.pids) % len(self.pairs)]
            self.pids[member] = event.facts["pid"]
            for what, text in records.items():
                self.notes.put(what, member, text)
            Path("do").write_text(line.replace("FIRST", str(next(iter(self.pids.values())))))
            Path("do").rename(f"do{member}")
            self.has_started()

    def run(self, *pairs: tuple[str, dict], beside=lambda: None, **given) -> int:
        """Return the exit code; a thread does `beside` meanwhile, and replicas that wait may go then."""
        self.pairs, self.events, self.pids = pairs, list[Event](), {}
        given = {"use_cpu": True, "elastic": "1:4", "meet": "file:///x", "max_restarts": 0} | given
        with showing(self), ThreadPoolExecutor() as pool:
            thread = pool.submit(beside)
            thread.add_done_callback(lambda _: Path("go").touch())
            launcher = replicas.Launcher(LaunchSettings(**given), START, self.transport, Path(mkdtemp(dir=".")), "mine")
            code = launcher.run([{}] * len(pairs))
        thread.result()
        return code

    def said(self) -> list[str]:
        return [str(event) for event in self.events if event.kind is not Kind.PROCESS]


@pytest.fixture
def lab(home, monkeypatch):
    monkeypatch.setattr(supervisor, "_FIRST_WAIT_S", 0.0)
    (home / "run").mkdir()
    return Lab(transport_at((home / "run").as_uri()))


@pytest.mark.parametrize(
    ("line", "records", "num_started", "code", "last"),
    [
        ("exit 3", {}, 1, FAILED, "ended with exit code 3; it is not started again"),
        ("exit 128", {}, 1, FAILED, "ended with exit code 128; it"),
        ("exit 129", {}, 3, FAILED, "ended with exit code 129; it"),
        ("exit 3", MET, 3, FAILED, "ended with exit code 3; it"),
        ("kill -KILL $$", {}, 3, FAILED, "was killed by SIGKILL; it"),
        ("kill -TERM $$", ASKED, 3, FAILED, "was asked to end, and did so after a round; it"),
        (REPORTS, ITS_DONE, 1, HUNG, "ended with exit code 1 (RankFailure: no answer) after its training was over; it"),
        ("exit 3", {"left": member_store.LATE}, 1, DONE, f"is not let in: {FINISHED}"),
        ("exit 0", MET, 1, DONE, None),
        ("exit 0", {}, 1, DONE, f"has finished, but none of its outer loops ever met the others. {PASS}"),
        (REPORTS, {}, 1, HUNG, "ended with exit code 1 (RankFailure: no answer); it"),
        (WRONG, MET, 1, FAILED, "ended with exit code 1 by a wrong use, see above; it"),
        (MISSING, MET, 2, FAILED, "ended with exit code 1 by a wrong use, see above; it"),
        (reporting("OSError: a disk", "own"), MET, 3, FAILED, "ended with exit code 1 (OSError: a disk); it"),
    ],
)
def test_how_a_process_ends_decides_whether_another_starts_and_the_code(line, records, num_started, code, last, lab):
    lab.has_started = lambda: lab.notes.send(Event.now(Kind.NOTE, message="of a replica"), "mine")
    assert lab.run((line, records), max_restarts=2, heartbeat_s=100.0) == code
    said = [sentence for sentence in lab.said() if sentence != "of a replica"]
    assert len(lab.pids) == len(lab.said()) - len(said) == num_started
    assert f"replica 0 of mine {last}" in said[-1] if last else not said
    has_end = [bool(lab.notes.get("gone", member) or lab.notes.get("left", member)) for member in lab.pids]
    assert has_end == [True] * num_started, "a generation may still name any of them"
    if records is ASKED:
        assert {lab.notes.get("gone", member) for member in lab.pids} == {member_store.ASKED}
    assert (lab.notes.num_launchers(), lab.notes.num_ends()) == (0, num_started - (line == "exit 0"))


def test_a_replica_that_fails_once_another_has_finished_fails_no_run(lab):
    later = "while kill -0 FIRST; do sleep 0.01; done 2> /dev/null; "  # once the launcher has seen its end
    assert lab.run(("exit 0", MET), (later + "exit 3", MET), max_restarts=2) == DONE
    assert lab.said() == ["replica 1 of mine ended with exit code 3"]
    assert lab.run(("exit 3", ITS_DONE), (later + "exit 0", MET)) == DONE
    assert lab.run(("exit 3", MET), (later + "exit 0", MET)) == FAILED, "its work was not done"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("loop1 7", ["2 replicas have ended with equal weights"]),
        (
            "loop1 8",
            ["warning: replicas have ended with different weights, by digests: A with 8, replica 0 of mine with 7"],
        ),
        ("loop2 8", []),
    ],
)
def test_a_launcher_compares_the_weights_that_replicas_have_ended_with(other, says, lab):
    for name, weights, records in ("A", other, {}), ("B", "loop1 9", {"gone": "ended with exit code 1"}):
        member = lab.notes.enroll(name)
        for what, text in {"weights": weights, **records}.items():
            lab.notes.put(what, member, text)
    assert lab.run(("exit 0", MET | {"weights": "loop1 7"})) == DONE
    assert lab.said() == says


def test_launchers_under_this_one_report_a_hang_by_their_code(lab):
    codes = [lab.run((f"exit {code}", {}), ranks_per_replica=size) for code, size in ((4, 2), (5, 2), (4, 1))]
    assert codes == [HUNG, FAILED, FAILED]


def test_a_wrong_use_that_a_launcher_under_this_one_reports_is_not_repeated(lab):
    for code, num_started in (OF_REPLICAS[Cause.WRONG_USE], 1), (FAILED, 3):
        assert lab.run((f"exit {code}", MET), ranks_per_replica=2, max_restarts=2) == FAILED
        assert len(lab.pids) == num_started


def test_a_first_launcher_serves_until_others_have_ended_and_starts_nothing_once_its_store_is_gone(lab, monkeypatch):
    def beside():
        until(lambda: lab.pids and "launchers/mine" not in lab.board.list("launchers/"), timeout_s=9)
        lab.notes.send(Event.now(Kind.NOTE, message="of the other"))
        until(lambda: not lab.board.list("events/"), timeout_s=9)
        lab.notes.forget_launcher("other")

    monkeypatch.setattr(replicas, "_ASK_S", 0.01)
    server = served()
    lab = Lab(C10dTransport(("127.0.0.1", server.port)))
    lab.board.put("first", b"mine")
    lab.notes.note_launcher("other", "")
    assert (lab.run(("exit 0", MET), beside=beside), lab.said()) == (DONE, ["of the other"])
    lab.has_started = server.close
    assert lab.run(("exit 0", {}), ("exit 0", {})) == ENGINE
    assert [event.who for event in lab.events if event.kind is Kind.FAILED] == ["replica 1"]


def test_a_first_launcher_serves_for_as_long_as_a_replica_elsewhere_is_to_hear_that_the_run_has_ended(lab, monkeypatch):
    def beside():
        until(lambda: lab.pids and not lab.board.list("launchers/mine"), timeout_s=9)
        for _ in range(3):
            beat = lab.notes.latest_beat("mine")
            until(lambda beat=beat: lab.notes.latest_beat("mine") != beat, timeout_s=9)
        lab.notes.send(Event.now(Kind.NOTE, message="of the other"))
        until(lambda: not lab.board.list("events/"), timeout_s=9)
        lab.notes.note_end(waits, "ended with exit code 1")

    monkeypatch.setattr(replicas, "_ASK_S", 0.01)
    monkeypatch.setattr(replicas, "_PART_WITHIN_S", 0.0)
    server = served()
    lab = Lab(C10dTransport(("127.0.0.1", server.port)))
    lab.board.put("first", b"mine")
    lab.notes.note_launcher("other", "")
    lab.notes.beat("other", 100.0)
    waits = lab.notes.enroll("replica 0 of other", "other")
    lab.notes.put("process", waits)
    assert (lab.run(("exit 0", MET), beside=beside), lab.said()) == (DONE, ["of the other"])


@pytest.mark.parametrize("stops", ["kill -STOP $$", "sh -c 'kill -STOP $$'"], ids=["it", "what it has started"])
def test_the_board_has_which_replicas_are_stopped(stops, lab):
    def beside():
        ((member, pid),) = until(lambda: [*lab.pids.items()], timeout_s=9)
        try:
            until(lambda: lab.notes.get("stopped", member), timeout_s=9)
        finally:
            for one in (psutil.Process(pid), *psutil.Process(pid).children()):
                one.resume()
        until(lambda: not lab.notes.get("stopped", member), timeout_s=9)
        assert lab.board.list("launchers/") == ["launchers/mine"]
        assert lab.board.get("launchers/mine").decode() == address_of(os.getpid())
        assert lab.notes.get("process", member) == address_of(pid)
        assert lab.notes.latest_beat("mine").startswith("0.01 ")

    assert lab.run((f"{stops}; {WAITS}", MET), heartbeat_s=0.01, beside=beside) == DONE


def test_a_launcher_takes_the_place_of_a_first_one_that_is_silent_and_renews_the_records(lab, monkeypatch):
    def beside():
        (record,) = until(lambda: [*Path("run/process").glob("*")], timeout_s=9)
        os.utime(record, (0, 0))
        until(lambda: lab.board.get("first") == b"mine" and os.stat(record).st_mtime, timeout_s=9)

    monkeypatch.setattr(member_store, "_LEAST_LOST_S", 0.0)
    monkeypatch.setattr(replicas, "_RENEW_S", 0.0)
    lab.board.put("first", b"another")
    for machine in ("first", "mine"):
        lab.notes.send(Event.now(Kind.NOTE, message=f"to {machine}"), machine)
    assert lab.run((WAITS, MET), heartbeat_s=0.01, beside=beside) == DONE
    assert lab.said() == ["to mine", "to first"]


def test_a_signal_says_where_the_state_of_the_run_is_and_what_continues_it(lab, home):
    def interrupted(**given):
        code = lab.run((f"touch up; {WAITS}", MET), beside=stop, **given)
        Path("go").unlink()
        Path("up").unlink()
        return code, lab.said()[-1]

    def stop():
        until(Path("up").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    pull = "`farflung checkpoint pull file:///x model.safetensors` gets its weights"
    line = "so the same line begins it again."
    assert interrupted() == (128 + signal.SIGTERM, f"no state of this run lies at file:///x yet, {line}")
    states = SavedStates(lab.board.part("loop1"))
    states.write("1.6.end", 0, {})
    assert states.finish(Saved("1.6.end", position=1200, ranks=1, parts=()))
    where = "the state at step 1,200 lies at file:///x: the same line continues the run from there"
    assert interrupted() == (128 + signal.SIGTERM, f"{where}; {pull}.")
    lab.transport = C10dTransport(served(None))
    lab.board, lab.notes = lab.transport.board, member_store.LauncherNotes(lab.transport.board)
    lab.board.put("run", b"{}")
    assert interrupted(meet=None)[1].startswith("the state of this run was in its replicas alone")
