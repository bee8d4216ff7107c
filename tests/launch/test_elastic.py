# SPDX-License-Identifier: Apache-2.0
"""How a launcher begins a run of replicas or finds one that has begun: what it records and prints, what it refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from farflung.address.schemes import transport_at
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError
from farflung.base.events import Sink
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.config.resolve import Resolved
from farflung.launch import elastic
from farflung.launch.events import showing
from farflung.launch.network import Interface, get_free_port
from farflung.launch.plan import Script
from tests.launch.keyed import KEY, write_key
from tests.outer.elastic_run import served
from tests.python import call_farflung
from tests.waits import until


def prepared(**settings):
    """A launcher that has prepared a run, and the facts that it gives of it."""
    resolved = Resolved(LaunchSettings(use_cpu=True, **settings), {}, None)
    launcher = elastic.Replicas(resolved, Script(__file__, ("a b",)))
    return launcher, launcher.prepare()


@pytest.mark.parametrize("key", ["", KEY])
def test_a_run_is_served_with_its_settings_and_others_join_with_the_line_that_it_prints(key, home, monkeypatch):
    monkeypatch.setenv(environ.KEY, key)
    _launcher, facts = prepared(elastic="2:4", grace_s=7.0, ranks_per_replica=2)
    where = facts["address"]
    line = f"farflung launch --join {where} --cpu --ranks_per_replica 2 {__file__} 'a b'"
    assert facts == {"replicas": 2, "address": where, "join": f"more join with `{line}`"}
    board = transport_at(where, seal=Seal(bytes.fromhex(key)) if key else None).board
    run = {"expected": 2, "least": 2, "most": 4, "grace_s": 7.0, "state_every": None}
    first = until(lambda: board.get("run") and board.get("first"))  # nothing is answered to what is written
    assert json.loads(board.get("run")) == run
    assert prepared(join=where, replicas=100)[1] == {"replicas": 100, "address": where, "join": ""}
    assert board.get("first") == first
    with pytest.raises(ConfigError, match=f"This machine can't listen at {where}: Address already in use"):
        prepared(elastic="2:4", main_process_port=int(where.rpartition(":")[2]))


def test_a_run_that_begins_with_replicas_of_several_machines_expects_the_least_of_them(home):
    board = transport_at(prepared(elastic="2:4", replicas=1)[1]["address"]).board
    assert until(lambda: json.loads(board.get("run") or b"{}"))["expected"] == 2


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_launchers_of_the_same_line_find_the_run_and_print_how_its_settings_differ(kind, home):
    sink, said = Sink(), []
    sink.show = lambda event: said.append(str(event))
    meet = (home / "run").as_uri() if kind == "file" else f"tcp://127.0.0.1:{get_free_port()}"
    with showing(sink):
        _first, facts = prepared(elastic="1:4", meet=meet, grace_s=9.0)
        assert facts["address"] == meet.removeprefix("tcp://")
        assert (facts["join"], said) == ("the same line on any machine adds more", [])
        prepared(elastic="1:3", replicas=3, meet=meet, grace_s=7.0, state_every=5 if kind == "file" else None)
    differences = "most is 4, not 3, grace_s is 9.0, not 7.0"
    differences += ", state_every is not set, not 5" * (kind == "file")
    assert said == [f"the run at {meet} has settings of its own: {differences}"]


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("file:///proc/run", "Replicas can't meet in the folder /proc/run: No such file or directory"),
        ("file:///etc/hostname", "Replicas can't meet in the folder /etc/hostname: Not a directory"),
        pytest.param("s3://nowhere/run", "404 Not Found: The specified bucket does not exist", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_an_address_at_which_nobody_can_meet_is_refused(where, why):
    with pytest.raises(ConfigError, match=why):
        prepared(elastic="1:2", meet=where)


def test_a_run_that_is_not_there_is_not_joined_and_one_whose_record_is_gone_is_not_continued(home, monkeypatch):
    monkeypatch.setattr(elastic, "_FIND_WITHIN_S", 0.1)
    with pytest.raises(ConfigError, match=r"^join is 127.0.0.1:\d+, but no run can be reached there: "):
        prepared(join=f"127.0.0.1:{get_free_port()}")
    server = served(None)
    where = f"127.0.0.1:{server.port}"
    seconds = [0.0]  # between the times that it is asked
    with monkeypatch.context() as patch:
        patch.setattr(
            "farflung.comm.patience.time", SimpleNamespace(monotonic=lambda: sum(seconds), sleep=seconds.append)
        )
        with pytest.raises(ConfigError, match=f"^join is {where}, .* its first launcher has recorded no settings"):
            prepared(join=where)
    assert 0 < max(seconds) <= 1
    meet = (home / "run").as_uri()
    prepared(elastic="1:4", meet=meet)
    transport_at(meet).of_run(b"").board.delete("run")
    with pytest.raises(ConfigError, match=f"meet is {meet}, but .* Delete all of it, or give another address"):
        prepared(elastic="1:4", meet=meet)


@pytest.mark.parametrize("way", ["network", "folder", "network with a key"])
def test_replicas_get_their_variables_and_a_run_without_a_key_says_so(way, home, monkeypatch, capsys):
    followed, has_key = [], way.endswith("key")
    monkeypatch.setattr(elastic, "Launcher", lambda settings, start, *_: SimpleNamespace(run=lambda _: start({})))
    monkeypatch.setattr(elastic, "started", lambda command, variables: followed.append(variables) or 7)
    if way != "folder":  # as if this machine were reached by its name
        monkeypatch.setattr(elastic, "is_loopback", lambda address: False)
        monkeypatch.setattr(elastic, "choose_interface", lambda settings, host: Interface("eth0", "127.0.0.1"))
    words = ["--key_file", str(write_key(home))] if has_key else []
    words += ["--meet", f"file://{home}/run"] if way == "folder" else []
    launch = ("launch", "--cpu", "--elastic", "1:2", *words, "--outer", "diloco", "--outer-every", "4")
    (home / "train.py").touch()
    assert call_farflung(*launch, "train.py") == 7
    assert ("this run has no key: whoever can reach 127.0.0.1:" in capsys.readouterr().err) == (way == "network")
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo" if way == "folder" else "eth0"}
    variables |= {environ.KEY_FILE: f"{home}/run7.key"} if has_key else {}
    assert followed[0].items() >= variables.items()
    assert call_farflung(*launch, "--outer-lr", "-1", "train.py") == 2
    assert "--outer_lr is -1.0" in capsys.readouterr().err
