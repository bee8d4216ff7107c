# SPDX-License-Identifier: Apache-2.0
"""Ranks on this machine: start their processes, and report how they ended."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from farflung.base.causes import Cause
from farflung.base.events import FILES_ONLY, Kind, record
from farflung.base.lazy import LazyModule
from farflung.config.launch import LaunchSettings
from farflung.config.outer import AUTO
from farflung.config.resolve import Resolved
from farflung.launch.codes import BY_SIGNAL, CODES, DONE, OF_REPLICAS, REQUEUE
from farflung.launch.dry_run import described
from farflung.launch.folder import RunFolder
from farflung.launch.plan import Plan, Script, check_recipe, lone_environment, make_plan
from farflung.launch.report import in_order, in_short, show
from farflung.process.failure import OUTER_ASKED, OUTER_ATTACHED, OUTER_ROUND, PREEMPTED

if TYPE_CHECKING:
    from farflung.launch import agent
else:
    agent = LazyModule("farflung.launch.agent")


class Ranks:
    """Starts the processes of this machine, which form one world with those of other machines."""

    goes_on = False

    def __init__(self, resolved: Resolved, script: Script) -> None:
        self._resolved, self._settings, self._script = resolved, resolved.settings, script
        self._plan = make_plan(self._settings, script.name, script.arguments)
        self.is_lone = self._plan.alone and script.exec_alone
        check_recipe(resolved, self._plan.variables, self._plan.num_local * self._settings.num_machines)

    def described(self) -> str:
        return described(self._resolved, self._plan)

    def prepare(self) -> dict[str, Any]:
        plan, meeting = self._plan, self._plan.meeting
        machines = {"machines": meeting.num_machines, "machine_rank": self._settings.machine_rank}
        if meeting.num_machines > 1:
            record(Kind.WAITS, endpoint=meeting.endpoint, interface=str(meeting.interface), **machines)
        row = {"ranks": list(plan.ranks), "size": plan.num_local * meeting.num_machines}
        return {"processes": plan.num_local, **machines, **row, "command": [str(word) for word in plan.command]}

    def follow(self, folder: RunFolder) -> int:
        settings, plan = folder.with_logs(self._settings), self._plan
        plan = dataclasses.replace(plan, variables={**plan.variables, **folder.variables})
        if self.is_lone:
            become(plan)
        return start(settings, plan, self._script.is_inner)


def become(plan: Plan) -> None:
    """Turn this process into the one that the plan asks for; streams, signals and exit code are then the script's."""
    sys.stdout.flush()  # what a program has printed that called the launcher
    sys.stderr.flush()
    os.execvpe(plan.command[0], plan.command, lone_environment(plan.variables))


def start(settings: LaunchSettings, plan: Plan, is_inner: bool = False) -> int:
    """Run the plan's processes to their end, report a failure, and return the exit code, one of `codes`.

    With `is_inner` the launcher of replicas knows the cause from it: one of `OF_REPLICAS`, or 128 + the number of the
    signal that killed a rank.
    """
    outcome = agent.run_agent(plan, settings)
    for failure in outcome.failures:
        record(Kind.LOST, level=FILES_ONLY, rank=failure.rank, why=in_short(failure), how=failure.how)
    if outcome.is_preempted or PREEMPTED in outcome.notes:  # what followed is no failure
        return REQUEUE
    if outcome.failures:
        cause = in_order(outcome.failures)[0][0]
        if cause.cause is Cause.RUN_ENDED:  # under a launcher of replicas, which says so itself
            return cause.shell_code
        interface = plan.meeting.interface
        others_at = None if settings.num_machines == 1 else interface.address if interface else ""
        details = {"finished": outcome.finished, "others_at": others_at, "checkpoint": outcome.checkpoint}
        code = show(outcome.failures, settings.log_dir, **details)
        if outcome.signal is None:
            return code if is_inner and code > BY_SIGNAL else (OF_REPLICAS if is_inner else CODES)[cause.cause]
    if outcome.signal is not None:
        return BY_SIGNAL + outcome.signal
    if settings.outer_recipe is not None:
        _warn_of_idle_outer(settings, outcome.notes)
    return DONE


def _warn_of_idle_outer(settings: LaunchSettings, notes: Collection[str]) -> None:
    """Say that the outer loop which was asked for did nothing, and why, where that is so."""
    if OUTER_ROUND in notes:
        return
    if OUTER_ATTACHED in notes and settings.outer_recipe == AUTO:
        why = "it chose plain data parallelism, or the script ended before it chose"
    elif OUTER_ATTACHED in notes:
        why = "the script ended before the first round; try a smaller --outer_every"
    elif OUTER_ASKED in notes:
        why = "the script did not prepare a model together with its optimizer (`accelerator.prepare`)"
    else:
        why = "no optimizer of torch's made a step (Keras' fit has others)"
    record(Kind.WARNING, message=f"warning: --outer {settings.outer_recipe} did nothing: {why}.")
