# SPDX-License-Identifier: Apache-2.0
"""What replicas that meet at an address ask of it: the forecast is what a run in a folder counts."""

import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import unquote

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from farflung.address.folder import FolderBoard, FolderTransport
from farflung.address.member_store import LauncherNotes
from farflung.address.object_group import ObjectGroup
from farflung.address.object_store import BucketBoard, HubBoard
from farflung.address.saved_state import SavedStates
from farflung.base.errors import ConfigError
from farflung.base.sizes import HOP_BYTES_OF_REQUESTS
from farflung.cost import forecast, model
from farflung.cost.meeting import FORMS, MeetingPlace, Prices
from farflung.cost.model import Method, Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.members.elastic import Elastic
from farflung.outer import OuterLoop
from farflung.testing.patience import patience
from tests.recipes import made

ASKED, LOCK = Counter(), threading.Lock()


def note(what, key, size):
    """Count a share that was written or read."""
    if re.search(r"/c0[^/]*/\d+[./]\d+", key):
        with LOCK:
            ASKED.update({what: 1, f"{what} bytes": size})


class CountingBoard(FolderBoard):
    """Counts the shares that are written, and those that are read."""

    def write_name(self, name, parts, is_new):
        super().write_name(name, parts, is_new)
        note("writes", unquote(name), sum(memoryview(part).nbytes for part in parts))

    def read_name(self, name, act, *span):
        def counted(file, *more):
            found = act(file, *more)
            sizes.append(file.tell() - (span[0][0] if span else 0))
            return found

        sizes = []
        found = super().read_name(name, counted, *span)
        if found is not None:
            note("reads", unquote(name), sizes[-1])
        return found


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4096, 1, bias=False) for _ in range(4)])


def asked_of_a_folder(folder, recipe, replicas, steps, bucket_bytes):
    """Train that many steps; return what was asked in that time."""
    folder.mkdir()
    ASKED.clear()
    notes = LauncherNotes(FolderTransport(folder).board)
    members = [notes.enroll(f"replica {name}") for name in range(replicas)]

    def train(member):
        transport = FolderTransport(folder)
        transport.board = CountingBoard(str(folder), path=str(folder))
        membership, model = Elastic(transport, member, expected=replicas, grace_s=patience(60)), Layers()
        outer = OuterLoop(model, recipe, membership=membership, bucket_bytes=bucket_bytes)
        for _ in range(steps):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1 + members.index(member)
            outer.step()
        outer.close()

    with ThreadPoolExecutor(replicas) as pool:
        list(pool.map(train, members))
    return Counter(ASKED)


RECIPES = {name: made(name, every=4) for name in ("diloco", "local_sgd", "sparse_loco", "gossip")}
RECIPES["streaming_diloco"] = made("streaming_diloco", codec="int8")


@pytest.mark.parametrize(
    ("replicas", "address", "hop_bytes"),
    [(2, "s3", 0), (3, "folder", 0), (2, "folder", HOP_BYTES_OF_REQUESTS), (4, "s3", HOP_BYTES_OF_REQUESTS)],
)
@pytest.mark.parametrize("name", RECIPES)
def test_the_requests_of_a_round_are_those_of_a_run(name, replicas, address, hop_bytes, tmp_path, monkeypatch):
    """Of shares all, none more and none fewer; in bytes up to 3 % and 1 kB for each of the votes."""
    monkeypatch.setattr(FolderBoard, "lists_at_once", MeetingPlace(address).lists_at_once)
    monkeypatch.setattr(ObjectGroup, "hop_bytes", hop_bytes)
    monkeypatch.setattr(model, "HOP_BYTES_OF_REQUESTS", hop_bytes)
    recipe, bucket_bytes, rounds = RECIPES[name], 4 * 4096, 6
    # What begins and ends a run is the same in both.
    asked = [asked_of_a_folder(tmp_path / str(n), recipe, replicas, n, bucket_bytes) for n in (8, 8 + 4 * rounds)]
    in_a_round = {name: (asked[1][name] - asked[0][name]) / rounds / replicas for name in asked[1]}
    run = Workload(4 * 4096, 4, 0.01, replicas, 1e9, request_s=0.001)
    method = method_of(recipe, run.parameters, name=name, bucket_bytes=bucket_bytes)
    traffic = MeetingPlace(address).traffic(run, cost_of(run, method), 1000)
    assert in_a_round["writes"] == traffic.writes_per_round
    assert in_a_round["reads"] == traffic.reads_per_round
    votes, written, read = 1000 * 2 * method.fragments, traffic.bytes_written_per_round, traffic.bytes_read_per_round
    headers = 300 * traffic.reads_per_round
    states = SavedStates(FolderTransport(tmp_path / "32").board.part("loop1"))
    assert traffic.state_bytes <= states.num_bytes(next(states.newest())) <= traffic.state_bytes + 10_000
    assert written <= in_a_round["writes bytes"] <= 1.03 * written + votes + headers
    assert read <= in_a_round["reads bytes"] <= 1.03 * read + (replicas - 1) * votes + headers


METHOD = Method("plain", every=10, confirmed=True, bucket_bytes=4 * 10**5)
RUN = Workload(10**6, 1, 1.0, 4, 8e6, request_s=0.05)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("replicas", "num_hops", "num_read"), [(4, 2, 1.5), (3, 1, 2), (2, 1, 1)])
def test_a_round_at_an_address_takes_its_requests_and_payloads_one_after_the_other(replicas, num_hops, num_read, lists):
    cost = cost_of(replace(RUN, replicas=replicas, lists_at_once=lists), METHOD)
    requests = replicas * num_hops * 10 + 2 * (2 if lists and replicas > 3 else replicas)
    assert cost.seconds_per_step == pytest.approx(1 + (requests * 0.05 + (1 + num_read) * 4.0) / 10)
    assert cost.bytes_sent_per_round == 4e6
    assert cost.bytes_received_per_round == pytest.approx(num_read * 4e6)
    hidden = cost_of(RUN, Method("late", every=40, delay=40, confirmed=True, bucket_bytes=4 * 10**5))
    assert hidden.utilization == 1.0


def test_money_is_requests_bytes_moved_and_bytes_kept():
    cost = cost_of(RUN, METHOD)

    def usd(*prices):
        return MeetingPlace("s3", Prices(*prices)).traffic(RUN, cost, 1000).usd

    traffic = MeetingPlace("s3").traffic(RUN, cost, 1000)
    assert traffic.usd is None
    assert traffic.lists_per_round == 2
    assert traffic.records_per_round == pytest.approx(10 * cost.seconds_per_step / 10 + 1 / 4)
    rounds = 100
    assert usd(1, 0, 0, 0) == pytest.approx(4 * rounds * (24 + traffic.records_per_round) / 1000)
    assert usd(0, 1, 0, 0) == pytest.approx(4 * rounds * 60 / 1000)
    assert usd(0, 0, 1, 0) == pytest.approx(4 * rounds * 6e6 / 1e9)
    assert usd(0, 0, 0, 1) == pytest.approx(traffic.bytes_stored / 1e9 * 1000 * cost.seconds_per_step / (30 * 86400))
    assert usd(1, 2, 3, 4) == pytest.approx(sum(usd(*[n * (n == k) for n in (1, 2, 3, 4)]) for k in (1, 2, 3, 4)))


PLAN = ["--parameters", "124M", "--steps", "20k", "--step_seconds", "0.5", "--bandwidth", "1Gbit", "--replicas", "4"]


def planned(*arguments):
    return CliRunner().invoke(forecast.plan, [*PLAN, *arguments], catch_exceptions=False)


def test_plan_shows_what_the_address_is_asked_and_the_line_that_meets_there():
    found = json.loads(planned("--meet", "s3", "--json").output)
    assert found["run"]["request_s"] == 0.05
    assert all(row["meet"]["usd"] is None for row in found["methods"])
    assert not any(row["method"].startswith("DDP") for row in found["methods"])
    plain = json.loads(planned("--json").output)
    assert all(row["meet"] is None for row in plain["methods"])
    prices = ("--prices", "0.005", "0.0004", "0.09", "0.023")
    shown = planned("--meet", "s3://mine/run7", "--request", "10ms", *prices).output
    assert max(map(len, shown.split("Flags of")[0].splitlines())) <= 80
    command = "farflung launch --elastic 1:4 --meet s3://mine/run7 --outer"
    assert all(words in shown for words in ("10 ms a request", "at s3://mine/run7", command))
    assert "--meet file:///shared/run --outer" in planned("--meet", "folder").output


@pytest.mark.parametrize(("flag", "value"), [("--latency", "25ms"), ("--buffers", "50MB")])
def test_plan_refuses_what_an_address_has_no_use_for(flag, value):
    with pytest.raises(ConfigError, match=f"{flag} is {value}, which has no effect with --meet s3"):
        planned("--meet", "s3", flag, value)
    assert planned(flag, value).exit_code == 0
    assert CliRunner().invoke(forecast.plan, [*PLAN, "--meet", "s3"], default_map={flag[2:]: value}).exit_code == 0


def test_launchers_write_heartbeats_as_often_as_it_counts():
    for name, board in {"folder": FolderBoard, "s3": BucketBoard, "hf": HubBoard}.items():
        assert FORMS[name].sign_s == board.heartbeat_s
