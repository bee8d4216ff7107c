# SPDX-License-Identifier: Apache-2.0
"""The report of `farflung doctor`: what was found, what to do about what is wrong, and the plan that fits the line."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.base.lazy import LazyModule
from farflung.base.words import in_rate, in_seconds
from farflung.cost.methods import synchronizations
from farflung.cost.model import Workload
from farflung.doctor import machine
from farflung.doctor.probe import Found, unknown, within

if TYPE_CHECKING:
    from farflung.doctor import address, line
else:  # loaded by their probes, as they need torch, which may be what is wrong
    address = LazyModule("farflung.doctor.address")
    line = LazyModule("farflung.doctor.line")

_WIDTH = 15
_LAYERS = 24  # as in `farflung plan`
_STEP_S = 1.0  # it has no effect on how long a synchronization takes
_LOAD_S = 60.0  # torch may be loaded from a slow disk; that is no probe


@dataclass(frozen=True)
class Asked:
    """The flags of `farflung doctor`."""

    folder: Path
    parameters: int
    timeout_s: float
    num_cores: int
    meet: str | None = None
    place: Mapping[str, Any] | None = None  # of this machine among others, as `line.Endpoint` has it


@dataclass
class Report:
    """What was found, by the names of the probes."""

    found: dict[str, Found] = field(default_factory=dict)
    plan: str | None = None

    @property
    def todo(self) -> list[str]:
        return [one for found in self.found.values() for one in found.todo]

    def as_json(self) -> str:
        figures = {name: dict(found.figures) for name, found in self.found.items()}
        return json.dumps({**figures, "todo": self.todo, "plan": self.plan}, indent=2)

    def as_text(self) -> str:
        lines = [f"farflung doctor on {platform.node()}", ""]
        for name, found in self.found.items():
            first, *more = found.text.split("\n")
            lines += [f"{name:<{_WIDTH}}{first}", *(f"{'':<{_WIDTH}}{line}" for line in more)]
        lines += ["", "What to do:", *(f"- {one}" for one in self.todo or ["nothing: all that was asked is fine"])]
        if self.plan is not None:
            lines += ["", "With the steps of your run, and how long one takes alone:", self.plan]
        return "\n".join(lines)


def examine(asked: Asked, say: Callable[[str], None]) -> Report:
    """Ask all that was asked for, one after the other; `say` prints a line before what may wait for others."""
    report = Report()

    def probe(name: str, act: Callable[[], Found], timeout_s: float = asked.timeout_s) -> None:
        report.found[name] = within(timeout_s, name, act)

    probe("versions", machine.versions, max(_LOAD_S, asked.timeout_s))
    probe("devices", machine.devices)
    probe("shared memory", machine.shared_memory)
    probe("open files", machine.open_files)
    probe("cores", partial(machine.cores, asked.num_cores))
    probe("memory", machine.memory)
    probe("folder", partial(machine.folder, asked.folder))
    probe("clock", machine.clock)
    meet = asked.meet
    if asked.place is not None:
        place, size = asked.place, int(asked.place["size"])
        at = f"{place['host']}:{place['port']}, over {place['interface']}"
        say(f"machine {place['rank']} of {size} waits up to {in_seconds(asked.timeout_s)} for the others at {at}")
        versions = {name: str(fact) for name, fact in report.found["versions"].figures.items()}
        limit_s = asked.timeout_s * (3 + size**2)  # there is one for each wait
        probe("lines", lambda: line.measure(line.Endpoint(**place), versions, asked.timeout_s), limit_s)
        _plan_for_a_line(report, asked, size)
    elif meet is None:
        report.found["lines"] = unknown("run it on each machine at the same time, with --num_machines 2 and so on")
    if meet is not None:
        probe("meet", lambda: address.measure(meet, asked.timeout_s), 2 * asked.timeout_s)
        _plan_for_an_address(report, asked, meet)
    return report


def _plan_for_a_line(report: Report, asked: Asked, machines: int) -> None:
    """Forecast for the slowest of the lines that were measured."""
    lines = report.found["lines"].figures.get("lines", {}).values()
    known = [one for one in lines if "bits_per_s" in one]
    if not known:
        report.found["synchronizing"] = unknown("no line was measured")
        return
    rate, latency_s = min(one["bits_per_s"] for one in known), max(one["round_trip_s"] for one in known) / 2
    line = f"--bandwidth {_flag(in_rate(rate))} --latency {_flag(in_seconds(latency_s))} --replicas {machines}"
    _forecast(report, asked, line, replicas=machines, bandwidth_bps=rate, latency_s=latency_s)


def _plan_for_an_address(report: Report, asked: Asked, address: str) -> None:
    found = report.found["meet"].figures
    if "put_s" not in found:
        report.found["synchronizing"] = unknown("no request was measured")
        return
    rate, request_s = (
        8 * min(found["write_bytes_per_s"], found["read_bytes_per_s"]),
        max(found["put_s"], found["get_s"]),
    )
    line = f"--bandwidth {_flag(in_rate(rate))} --request {_flag(in_seconds(request_s))} --meet {address} --replicas 2"
    _forecast(report, asked, line, replicas=2, bandwidth_bps=rate, request_s=request_s)


def _forecast(report: Report, asked: Asked, line: str, **settings: Any) -> None:
    run = Workload(parameters=asked.parameters, layers=_LAYERS, step_s=_STEP_S, **settings)
    found = synchronizations(run)
    text = "\n".join(f"{name}: {in_seconds(seconds)}" for name, seconds in found.items())
    text = f"{asked.parameters:,} parameters once, as forecast, with nothing computed meanwhile\n{text}"
    report.found["synchronizing"] = Found(text, {"parameters": asked.parameters, "seconds": found})
    report.plan = f"farflung plan --parameters {asked.parameters} --step_seconds {_STEP_S:g} --steps 20k {line}"


def _flag(amount: str) -> str:
    """Return an amount as one word of a command line: `19.1Mbit/s`."""
    return amount.replace(" ", "")
