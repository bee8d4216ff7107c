# SPDX-License-Identifier: Apache-2.0
"""A run that failed is blamed on the rank that failed first, not on those that it took with it."""

from __future__ import annotations

import random
import signal
import socket

import pytest

from farflung.base.causes import Cause
from farflung.config.launch import LaunchSettings
from farflung.launch.agent import newest_checkpoint
from farflung.launch.events import Screen, showing
from farflung.launch.report import Failure, explain, in_order, in_short, show
from farflung.process.failure import CHECKPOINT


@pytest.fixture(autouse=True)
def _on_the_screen():
    with showing(Screen(LaunchSettings())):
        yield


LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def failed(rank: int, message: str | None = None, code: int = 1, time_s: float = 100.0) -> Failure:
    cause = Cause.PEER if message == LOST else Cause.OWN
    trace = message and f"Traceback\n{message}"
    return Failure(rank, code, message=message, traceback=trace, time_s=time_s, reported_cause=cause)


@pytest.mark.parametrize(
    ("failures", "cause", "code"),
    [
        ([failed(0, LOST, time_s=100.1), failed(1, "ValueError: x", time_s=100.2)], 1, 1),
        ([failed(0, "ValueError: x", time_s=100.2), failed(1, "KeyError: y", time_s=100.1)], 1, 1),
        ([failed(0, LOST, time_s=100.1), failed(1, code=-signal.SIGKILL, time_s=101)], 1, 137),
        ([failed(0, LOST, time_s=100.1), failed(1, code=3, time_s=101)], 1, 3),
        *(
            ([failed(0, "ValueError: x", time_s=100.9), failed(1, code=-number, time_s=101)], 1, 128 + number)
            for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
        ),
        ([failed(0, code=-signal.SIGTERM), failed(1, code=7), failed(2, code=-signal.SIGTERM)], 1, 7),
        # It did not hear the launcher's SIGTERM, and was killed when the patience was over.
        ([failed(0, code=-signal.SIGKILL, time_s=131), failed(1, "ValueError: x", time_s=100.2)], 1, 1),
        # It had reported its error and was on its way out when another one's end was noticed first.
        ([failed(0, LOST, time_s=100.2), failed(1, "ValueError: x", code=-signal.SIGTERM, time_s=100.1)], 1, 1),
        # Somebody ended rank 2 by hand: the agent lists it first.
        ([failed(2, code=-signal.SIGTERM), failed(0, code=-signal.SIGTERM)], 2, 143),
    ],
)
def test_the_cause_comes_first(failures, cause, code, capsys):
    assert in_order(failures)[0][0].rank == cause
    assert show(failures) == code
    assert f"rank {cause} failed on" in capsys.readouterr().err


def test_the_order_in_which_the_agent_lists_failures_of_their_own_does_not_matter():
    failures = [failed(rank, f"ValueError: {rank}", time_s=100 + 0.01 * rank) for rank in range(5)]
    failures += [failed(5, LOST, time_s=100), failed(6, code=-signal.SIGTERM)]
    for seed in range(10):
        random.Random(seed).shuffle(failures)
        own, ended = in_order(failures)
        assert [failure.rank for failure in own] == [0, 1, 2, 3, 4, 5]
        assert [failure.rank for failure in ended] == [6]


def test_the_report_names_ranks_codes_and_reasons(capsys):
    failures = [failed(0, "KeyError: 'y'", time_s=100.3), failed(1, "ValueError: [bold] bad", code=4), failed(2, LOST)]
    failures += [failed(rank, code=-signal.SIGTERM) for rank in (4, 3)]
    title, text = explain(failures)
    assert title.startswith("rank 1 failed on ")
    assert title.endswith("exit code 4")
    said = ["ValueError: [bold] bad", "rank 0 failed too: KeyError: 'y'", "then lost the connection to it: rank 2"]
    said += ["then ended by the launcher: ranks 3 and 4"]
    assert [sentence for sentence in said if sentence not in text] == []
    show(failures, log_dir="logs")
    printed = capsys.readouterr().err
    assert printed.count("rank 1 failed") == 1
    assert "[bold] bad" in printed  # what the error says is no markup
    assert "logs: logs" in printed


def test_a_rank_without_a_traceback_is_explained_by_its_end():
    title, text = explain([failed(1, code=-signal.SIGKILL)])
    assert title.endswith("signal 9 (SIGKILL)")
    assert text == "It was killed from outside. The operating system does this when memory runs out."
    assert explain([failed(1, code=3)])[1] == "It left no traceback for the launcher. Its output is above."
    title, text = explain([failed(1, code=-signal.SIGSEGV)], name="replica 4")
    assert (title.partition(" failed")[0], title.endswith("signal 11 (SIGSEGV)")) == ("replica 4", True)
    assert text == "It was ended by a signal, so there is no traceback."
    assert failed(0, code=-200).how == "signal 200"
    assert failed(0, "ValueError: x", code=-signal.SIGTERM).how == "exit code 1"
    assert Failure(0, -signal.SIGTERM, reported_code=7).how == "exit code 7"
    assert failed(0, "ValueError: x", code=-signal.SIGKILL).cause is Cause.OWN  # as it has said
    assert in_short(failed(0, f"\n{'word ' * 40}\nmore")) == f"{'word ' * 29}..."


def test_what_torch_wrote_and_what_we_wrote_is_read():
    said = {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "100"}}
    assert Failure.of(1, 1, {"message": said}) == Failure(1, 1, 0, "ValueError: x", "Traceback", 100.0)
    assert Failure.of(1, 1, {"message": said | {"message": LOST}}).cause is Cause.PEER  # torch records no cause
    said["extraInfo"] |= {"precise_timestamp": 100.25, "cause": "late"}
    assert Failure.of(1, 1, {"message": said}).time_s == 100.25
    assert Failure.of(1, 1, {"message": said}).cause is Cause.LATE
    assert Failure.of(1, -9, {"message": "<NONE>"}, pid=5, seen_s=7) == Failure(1, -9, 5, time_s=7)


def test_a_machine_where_nothing_but_the_connection_failed_points_to_the_others():
    assert "The cause is on another machine" in explain([failed(0, LOST), failed(1, LOST)], others_at="10.0.0.2")[1]
    assert "the report there" not in explain([failed(0, LOST), failed(1, "ValueError: x")], others_at="10.0.0.2")[1]
    assert "another machine" not in explain([failed(0, LOST), failed(1, LOST)])[1]
    late = Failure(0, 1, message="RankFailure: rank 2 did not come", traceback="T", reported_cause=Cause.LATE)
    assert "the report there" not in explain([late], others_at="10.0.0.2")[1]  # a rank that hangs leaves none


def test_a_rank_that_ended_well_too_early_is_named():
    text = explain([failed(0, LOST)], finished=[1, 3])[1]
    assert "ranks 1 and 3 ended with exit code 0 while others still needed it" in text
    assert "rank 1 ended with exit code 0." in explain([failed(0, "ValueError: x")], finished=[1])[1]


def test_the_newest_checkpoint_and_the_address_of_a_machine_are_named(tmp_path):
    title, text = explain([failed(1, "ValueError: x")], others_at="10.0.0.2", checkpoint=tmp_path / "checkpoint_2")
    assert title == f"rank 1 failed on {socket.gethostname()} (10.0.0.2): exit code 1"
    newest = "Resume from checkpoint_2, the newest checkpoint of this run"
    assert text.endswith(f"{newest}: load_state('{tmp_path}/checkpoint_2')")
    (place := tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (place / CHECKPOINT).write_text("s3://bucket/run/checkpoint_2")
    _, text = explain([failed(1, "ValueError: x")], checkpoint=newest_checkpoint(tmp_path))
    assert text.endswith(f"{newest}: load_state('s3://bucket/run/checkpoint_2')")
