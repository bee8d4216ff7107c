# SPDX-License-Identifier: Apache-2.0
"""`farflung doctor`: alone, between two machines, over a slow line, at an address, and where something is wrong."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from farflung.doctor import line, machine
from farflung.doctor.probe import Found, within
from farflung.doctor.report import Asked, Report, _plan_for_a_line
from farflung.launch.main import farflung
from farflung.launch.network import get_free_port
from farflung.testing.patience import patience
from tests.launch.machines import ADDRESSES, DEVICE, Machines, two_machines
from tests.python import call_farflung

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
ONE_MACHINE, TWO_MACHINES = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MEGABITS = 20
SMALL = ("--parameters", "1M")
WORDS = {"Put": "write", "List": "list", "Delete": "delete"}  # which a gateway's keys may lack
RUN = "from farflung.launch.main import main; import sys; main(sys.argv[1:])"
# Faults of a machine, as what its Python does first.
OLDER = "import platform; platform.python_version = lambda: '3.9.0'"
BEHIND_A_FIREWALL = """
import socket
from farflung.doctor import line
class Nobody(socket.socket):
    def accept(self):
        raise OSError
def closed(address, port):
    one = Nobody()
    one.bind((address, port))
    return one
line.listening_socket = closed
"""
# It pauses after its last word to the others.
SLOW_TO_END = """
import time
from farflung.address.c10d_transport import StoreBoard
put = StoreBoard.put
StoreBoard.put = lambda board, key, value: (put(board, key, value), time.sleep(3 * key.startswith("done")))
"""
SITE = line.Endpoint(0, 2, "10.0.0.1", 29500, None, "10.0.0.1", "eth0")


def doctor(*words):
    """What the command prints here, and the figures if it was asked for them; its exit code fits what it advises."""
    done = CliRunner().invoke(farflung, ["doctor", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    if "--json" not in words:
        return done.output
    found = json.loads(done.stdout)
    assert done.exit_code == (1 if found["todo"] else 0)
    return found


def on_two_machines(fault=""):
    """The port at which two machines meet on this one, and what each finds; the second one has a fault."""
    port, running = get_free_port(), []
    flags = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--timeout", "60", "--json", *SMALL]
    for rank in range(2):
        program = ["-c", f"{fault}\n{RUN}"] if fault and rank else ["-m", "farflung"]  # which may be warm
        command = [sys.executable, *program, "doctor", "--num_machines", "2", "--machine_rank", str(rank), *flags]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    for process in running:
        printed, errors = process.communicate(timeout=patience(200))
        assert process.returncode in (0, 1), errors
        found.append(json.loads(printed))
        assert process.returncode == (1 if found[-1]["todo"] else 0)
    return port, *found


def advice(found, name):
    """What a report advises on one of its probes."""
    return "\n".join(one for one in found["todo"] if one.startswith(f"{name}:"))


def runs(plan):
    program, *arguments = shlex.split(plan)
    assert (program, CliRunner().invoke(farflung, arguments).exit_code) == ("farflung", 0), plan


def alike(text):
    """What a screen says, whatever its figures, names and units."""
    text = re.sub(r"(?<!\w)(?:/[\w.-]+)+", "PATH", text)
    return " ".join(re.sub(r"\d[\d.,:e+-]*(?: (?:[kMGT]?B|us|ms|s|[kMG]?bit/s)\b)?", "N", text).split())


def test_alone_it_finds_what_a_machine_is(home):
    found = doctor("--json", "--folder", home)
    assert {"versions", "devices", "shared memory", "open files", "cores", "memory", "folder", "clock"} < found.keys()
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["open files"]["soft"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found["folder"]["write_bytes_per_s"] > 0
    assert found["folder"]["read_bytes_per_s"] > 0
    assert "not_known" in found["lines"]
    assert found["clock"]["ntp"] is None
    assert list(home.iterdir()) == []


def test_it_needs_no_flag_and_says_what_it_does_not_know(home):
    printed = doctor()
    assert "not known: whether NTP keeps it" in printed
    assert "not known: run it on each machine" in printed
    assert "What to do:" in printed


def test_a_folder_that_can_not_be_written_to_is_something_to_do(tmp_path):
    found = doctor("--json", "--folder", tmp_path / "gone")
    assert "No such file or directory" in found["folder"]["not_known"]
    assert "--folder" in advice(found, "folder")


def test_where_torch_can_not_be_loaded_the_other_probes_answer(tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {RUN}", "doctor", "--json"]
    done = subprocess.run([*command, "--meet", tmp_path.as_uri()], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert "can't be loaded" in advice(found, "torch")
    assert all("ModuleNotFoundError" in found[name]["not_known"] for name in ("devices", "meet"))
    assert found["memory"]["bytes"] > 0
    assert found["folder"]["write_bytes_per_s"] > 0


def test_limits_that_are_too_low_are_something_to_do(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 9000))
    assert "ulimit -n 9000" in machine.open_files().todo[0]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert not machine.open_files().todo
    monkeypatch.setattr(machine, "_LEAST_SHM_BYTES", 1e18)
    assert "--shm-size" in machine.shared_memory().todo[0]
    monkeypatch.setattr(machine, "_SLOW_FOLDER_BYTES_S", 1e18)
    assert "Use a faster one" in machine.folder(Path.cwd()).todo[0]
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (7.0, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 6)
    assert machine.cores(2).todo
    assert not machine.cores(8).todo
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    assert not machine.cores(2).todo, "a load of 7 leaves most cores of the host idle"


@pytest.mark.parametrize(
    "said",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sat Feb  4 00:01:46 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build",
    ],
)
def test_the_driver_is_named_and_a_torch_that_sees_no_gpu_is_something_to_do(said, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(f"{said}\nGCC version:  gcc version 13.3.0\n")
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "version")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    found = machine.devices()
    assert found.figures["driver"] == "580.65.06"
    assert "there is an NVIDIA driver (580.65.06), but torch" in found.todo[0]


def test_accelerators_are_counted_with_name_and_memory(monkeypatch):
    known = SimpleNamespace(name="NVIDIA L40S", total_memory=48 * 10**9)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(get_device_properties=lambda k: known))
    found = machine.devices()
    assert found.text.startswith("2 x NVIDIA L40S, 48 GB; driver ")
    assert found.figures["devices"] == [{"name": "NVIDIA L40S", "memory": 48 * 10**9}] * 2


def test_a_probe_that_fails_or_has_no_answer_is_not_known():
    never = threading.Event()
    found = within(0.1, "folder", lambda: Found(str(never.wait())))
    assert found.text == "not known: no answer within 100 ms"
    assert "--timeout" in found.todo[0]
    never.set()
    assert within(60, "memory", lambda: Found(str(1 / 0))).text.startswith("not known: ZeroDivisionError")


def test_two_machines_find_each_other_and_measure_their_line(warm):
    port, first, second = on_two_machines()
    lines = first["lines"]
    assert lines == second["lines"]
    assert (lines["port"], lines["missing"], lines["differing"]) == (port, [], {})
    assert lines["lines"].keys() == {"0 -> 1", "1 -> 0"}
    for measured in lines["lines"].values():
        assert measured["bits_per_s"] > 1e6
        assert abs(measured["skew_s"]) <= measured["round_trip_s"] / 2 + 1e-3  # it is one clock
    assert first["synchronizing"]["seconds"]["diloco"] > first["synchronizing"]["seconds"]["sparse_loco"] > 0
    runs(first["plan"])


@pytest.mark.long
def test_versions_that_differ_are_named_with_their_machines(warm):
    here = sys.version.split()[0]
    for found in on_two_machines(OLDER)[1:]:
        assert found["lines"]["differing"] == {"python": {"0": here, "1": "3.9.0"}}
        assert f"python is {here} on machine 0, 3.9.0 on machine 1" in advice(found, "versions")


@pytest.mark.long
def test_a_machine_that_ends_last_has_all_figures_too(warm):
    _, first, second = on_two_machines(SLOW_TO_END)
    assert first["lines"] == second["lines"]
    assert first["lines"]["lines"]["0 -> 1"]["bits_per_s"] > 0


@pytest.mark.long
def test_a_machine_that_can_not_be_reached_is_named_with_its_address(warm):
    _, first, second = on_two_machines(BEHIND_A_FIREWALL)
    lines = first["lines"]["lines"]
    assert lines == second["lines"]["lines"]
    assert lines["0 -> 1"] == {"unreachable": "Connection refused"}
    assert lines["1 -> 0"]["bits_per_s"] > 0
    assert "0 -> 1: 127.0.0.1 can't be reached" in advice(first, "lines")


def test_a_machine_that_does_not_come_is_named_after_the_time_limit():
    here = ("--num_machines", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", get_free_port())
    found = doctor("--json", *here, "--machine_rank", 0, "--timeout", 1)
    assert found["lines"]["missing"] == [1]
    assert "machine 1 did not come within 1 s" in advice(found, "lines")
    assert "not_known" in found["synchronizing"]
    found = doctor("--json", *here, "--machine_rank", 1, "--timeout", 1)
    assert "machine 1 does not reach machine 0" in advice(found, "lines")


def test_clocks_that_differ_are_something_to_do():
    came = {rank: {"address": f"10.0.0.{rank + 1}", "interface": "eth0", "facts": {}} for rank in range(2)}
    measured = {"0 -> 1": {"bits_per_s": 1e8, "round_trip_s": 0.02, "skew_s": -90.0}}
    found = line._described(SITE, came, measured, 10.0)
    assert "-90 s" in found.todo[0]
    assert "100 Mbit/s, round trip 20 ms" in found.text


@pytest.mark.namespace
@pytest.mark.timeout(240)
def test_over_a_line_of_20_megabits_that_is_what_it_measures(tmp_path):
    flags = f"--num_machines 2 --main_process_ip {ADDRESSES[0]} --timeout 60 --json"
    with two_machines(Machines(MEGABITS)) as machines:
        # The first to come waits, whichever it is.
        lines = {rank: f"farflung doctor {flags} --machine_rank {rank} 2>errors{rank}" for rank in (1, 0)}
        processes = [machines.start(rank, ["sh", "-c", line], tmp_path) for rank, line in lines.items()]
        found, other = (json.loads(one.communicate(timeout=patience(150))[0]) for one in processes)
    assert found["lines"] == other["lines"]
    for measured in found["lines"]["lines"].values():
        assert measured["bits_per_s"] == pytest.approx(MEGABITS * 1e6, rel=0.3)
    assert [one["interface"] for one in found["lines"]["machines"].values()] == [DEVICE, DEVICE]
    # 124M parameters of 32 bits to one other machine.
    assert found["synchronizing"]["seconds"]["diloco"] == pytest.approx(124e6 * 32 / MEGABITS / 1e6, rel=0.35)
    runs(found["plan"])


def test_at_a_folder_it_measures_requests_and_leaves_nothing(tmp_path):
    address = (tmp_path / "run").as_uri()
    found = doctor("--json", "--meet", address, *SMALL)
    assert found["meet"]["creates_once"] is True
    assert all(found["meet"][name] > 0 for name in ("put_s", "get_s", "list_s", "write_bytes_per_s"))
    assert list(tmp_path.iterdir()) == []
    assert f"--meet {address}" in found["plan"]
    runs(found["plan"])


def test_at_a_bucket_it_measures_requests_and_leaves_nothing(bucket, s3):
    s3.set(late_s=0.05)
    found = doctor("--json", "--meet", bucket, *SMALL, "--timeout", 60)
    assert found["meet"]["creates_once"] is True
    assert min(found["meet"][name] for name in ("put_s", "list_s")) >= 0.05
    runs(found["plan"])


def test_a_bucket_that_overwrites_what_is_to_be_created_once_is_something_to_do(bucket, s3):
    s3.set(create="ignored")
    found = doctor("--json", "--meet", bucket, *SMALL, "--timeout", 60)
    assert found["meet"]["creates_once"] is False
    assert "Use another store" in advice(found, "meet")


@pytest.mark.parametrize(
    ("place", "act", "why"),
    [
        *(("bucket", act, f"may lack a permission: s3:{act}Object") for act in ("Put", "Get", "Delete")),
        ("bucket", "List", "may lack a permission: s3:ListBucket"),
        *(("hub", act, f"of a token that may not {word} objects here") for act, word in WORDS.items()),
        ("hub", "Get", r"GET \S+: 403 Forbidden: Access Denied"),
    ],
)
def test_each_permission_that_keys_lack_is_something_to_do(s3, request, place, act, why):
    address = request.getfixturevalue(place)
    s3.set(denied=[act])
    found = doctor("--json", "--meet", address, *SMALL, "--timeout", 4)
    assert re.search(why, advice(found, "meet"))


def test_an_address_without_an_answer_is_something_to_do(bucket, s3, tmp_path):
    s3.set(error_s=600)
    found = doctor("--json", "--meet", bucket, *SMALL, "--timeout", 4)
    assert "can't be used" in advice(found, "meet")
    assert "not_known" in found["synchronizing"]
    found = doctor("--json", "--meet", (tmp_path / "no" / "run").as_uri(), *SMALL)
    assert "No such file or directory" in advice(found, "meet")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--timeout", "0"], "--timeout is 0; it must be more than 0 s"),
        (["--parameters", "many"], "--parameters is 'many'"),
        (["--num_machines", "2"], "main_process_ip is not set"),
        (["--meet", "tcp://10.0.0.1:29500"], "not the address of a folder or a bucket"),
    ],
)
def test_what_it_can_not_be_asked_is_refused(words, why):
    done = CliRunner().invoke(farflung, ["doctor", *words])
    assert done.exit_code == 1
    assert why in str(done.exception)


def test_notes_on_settings_are_printed_before_what_is_refused(home, capsys):
    (home / "farflung.yaml").write_text("distributed_type: MULTI_CPU\ndeepspeed_config: {zero_stage: 3}\n")
    assert call_farflung("doctor", "--meet", "tcp://10.0.0.1:29500") == 2
    assert "`deepspeed_config` is not read" in capsys.readouterr().err


def test_the_page_shows_the_screen_of_one_machine(home):
    shown, screen = ONE_MACHINE.splitlines(), doctor("--folder", home).splitlines()
    names = [row[:15] for row in shown]
    assert names[: names.index("What to do:")] == [row[:15] for row in screen][: names.index("What to do:")]
    for name in ("versions", "memory", "folder", "clock", "lines"):
        (there,), (here,) = ([alike(row) for row in rows if row.startswith(name)] for rows in (shown, screen))
        if name == "versions":  # torch and its build follow
            there, here = (row.partition(" torch")[0] for row in (there, here))
        assert here.startswith(there), name


def test_the_page_shows_the_screen_of_two_machines(tmp_path):
    versions = {"python": "3.12.3", "torch": "2.13.0"}
    came = {
        0: {"address": "10.0.0.1", "interface": "eth0", "facts": versions},
        1: {"address": "10.0.0.2", "interface": "eth0", "facts": {**versions, "torch": "2.11.0"}},
    }
    measured = {
        "0 -> 1": {"bits_per_s": 19.1e6, "round_trip_s": 0.04, "skew_s": 0.003},
        "1 -> 0": {"bits_per_s": 18.7e6, "round_trip_s": 0.04, "skew_s": -0.003},
    }
    report = Report({"lines": line._described(SITE, came, measured, 10.0)})
    _plan_for_a_line(report, Asked(tmp_path, 124_000_000, 10.0, 2), 2)
    assert TWO_MACHINES.rstrip() == report.as_text().partition("\n\n")[2]
    runs(report.plan)
