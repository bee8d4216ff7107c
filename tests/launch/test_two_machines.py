# SPDX-License-Identifier: Apache-2.0
"""The page "Two machines": its commands are run on two machines made of namespaces, and say what it says they do."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from farflung.launch.codes import FAILED, HUNG, USAGE
from farflung.testing.patience import patience
from tests.launch.machines import ADDRESSES, LISTENING, NAMES, Machines, two_machines
from tests.launch.screen import Screen

PAGE = (Path(__file__).parents[2] / "docs" / "two-machines.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
MAX_LINES = 15
UNDER_WAY = "100 steps are done"

_FENCE = re.compile(r"^```(\w+) ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATIENCE_S = 90

pytestmark = [
    pytest.mark.namespace,
    pytest.mark.timeout(240),
]


def scenes(section: str) -> list[dict[str, str]]:
    """The runs of a section in order: each fence's content by what stands behind the opening."""
    found: list[dict[str, str]] = [{}]
    for kind, where, content in _FENCE.findall(section):
        key = f"{kind} {where}"
        if kind == "sh" and any(name.startswith("text") for name in found[-1]):
            found.append({})
        found[-1][key] = content
    return found


def alike(text: str) -> str:
    """What a text says, whatever its numbers and wherever it is wrapped; rounds and advice on speed are left out."""
    text = re.sub(r"^\[RANK 0\] Training spent .*$|^farflung: round \d+, .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"answer for \d+ s", "answer for SECONDS", text)
    text = re.sub(r"[─╭╮╰╯│\s]+", " ", text)
    text = re.sub(r"The transport said: .*? (?=The cause)", "", text)  # gloo hears of it in one way or in another
    return re.sub(r"\[\d[\d.]+\]:\d+", "ADDRESS", re.sub(r"\b\d+\.\d s\b", "SECONDS", text)).strip()


def play(machines: Machines, scene: dict[str, str], folder: Path) -> dict[str, tuple[str, int, float]]:
    """Run one scene; return what each machine said, how it ended, and how long that was after something was done."""
    screens = {}
    if "sh on both" in scene:
        for machine in (0, 1):
            Screen(machines.start(machine, scene["sh on both"].split(), folder)).end()
    for machine, name in enumerate(NAMES):
        if f"sh on {name}" in scene:
            screens[name] = Screen(machines.start(machine, ["sh", "-c", scene[f"sh on {name}"]], folder))
    deed = scene.get("sh after 100 steps on node1")
    if deed is not None:
        for screen in screens.values():
            screen.wait_for(UNDER_WAY)
    began = time.monotonic()
    if deed == "kill -9 -1\n":  # all processes of a machine; here those of the namespace, not of the host
        machines.kill(1)
    elif deed is not None:
        Screen(machines.start(1, deed.split(), folder)).end()
    return {
        name: (screen.end(), screen.process.returncode, time.monotonic() - began) for name, screen in screens.items()
    }


@pytest.fixture
def folder(tmp_path):
    for _, name, content in _FENCE.findall(PAGE):
        if "." in name and " " not in name:
            (tmp_path / name).write_text(content)
    return tmp_path


def checked(section: str, folder: Path) -> list[dict[str, tuple[str, int, float]]]:
    """Play the scenes of a section on two machines, and compare what is said with the page."""
    played = []
    with two_machines() as machines:
        for scene in scenes(SECTIONS[section]):
            said = play(machines, scene, folder)
            for name, (text, _, _) in said.items():
                assert len(text.splitlines()) <= MAX_LINES, text
                if f"text on {name}" in scene:
                    assert alike(text).replace(f"{folder}/", "/home/me/") == alike(scene[f"text on {name}"])
            played.append(said)
    return played


def test_every_section_is_run():
    assert list(SECTIONS) == [
        "With flags",
        "With a file",
        "Ports and firewalls",
        "Which network",
        "A slow line",
        "When a machine dies",
        "When the line is cut",
    ]


@pytest.mark.parametrize("section", ["With flags", "With a file"])
def test_two_machines_train_at_the_first_try(section, folder, request):
    if section != "With flags":
        request.getfixturevalue("warm")
    (said,) = checked(section, folder)
    assert [code for _, code, _ in said.values()] == [0, 0]


@pytest.mark.parametrize("section", ["Ports and firewalls", "Which network"])
def test_what_can_not_work_is_one_sentence(section, folder):
    for said in checked(section, folder):
        for text, code, _ in said.values():
            assert code == (HUNG if "could not meet" in text else USAGE), text


@pytest.mark.usefixtures("warm")
def test_machines_listen_on_the_network_between_them_alone(tmp_path):
    (tmp_path / "train.py").write_text(LISTENING.replace(" and each.pid in mine", ""))  # they have a network each
    flags = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "10.77.0.1"]
    with two_machines() as machines:
        command = ["farflung", "launch", *flags, "--machine_rank"]
        started = [machines.start(rank, [*command, str(rank), "train.py"], tmp_path) for rank in (0, 1)]
        assert [process.wait(patience(_PATIENCE_S)) for process in started] == [0, 0]
    for rank, address in enumerate(ADDRESSES):
        assert {*json.loads((tmp_path / f"rank{rank}.json").read_text())} == {address}


@pytest.mark.usefixtures("warm")
def test_an_outer_loop_is_faster_on_a_slow_line(folder):
    seconds = []
    for said in checked("A slow line", folder):
        assert [code for _, code, _ in said.values()] == [0, 0]
        seconds.append(float(re.findall(r"([\d.]+) s$", said["node0"][0], re.MULTILINE)[-1]))
    plain, outer = seconds
    assert outer < plain / 2, seconds  # on a busy machine; what the page shows is an idle one


@pytest.mark.usefixtures("warm")
def test_a_machine_that_dies_is_named_by_the_other_one(folder):
    (said,) = checked("When a machine dies", folder)
    text, code, seconds = said["node0"]
    assert code in (FAILED, HUNG)
    assert "rank 1 on node1" in text
    assert seconds < patience(30)


@pytest.mark.usefixtures("warm")
def test_a_cut_line_ends_both_machines_within_the_time(folder):
    (said,) = checked("When the line is cut", folder)
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        text, code, seconds = said[name]
        assert code == HUNG
        assert f"on {other}" in text
        assert seconds < patience(6 + 5 + 25)  # the time allowed, the time to ask around, and to start
