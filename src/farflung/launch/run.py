# SPDX-License-Identifier: Apache-2.0
"""What `farflung launch` does with its settings: refuse what can't work, start the script, report how it ended."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from farflung.base.causes import Cause
from farflung.base.events import EVENTS, FILES_ONLY, Kind, record
from farflung.base.files import FORMER_NAME
from farflung.config.launch import LaunchSettings
from farflung.config.places import former_files
from farflung.config.resolve import Resolved
from farflung.launch.codes import BY_SIGNAL, CODES, DONE, REQUEUE, EngineFailure, of_error
from farflung.launch.dry_run import described
from farflung.launch.events import FolderSink, Screen, showing
from farflung.launch.plan import Plan, check_recipe, lone_environment, make_plan, one_replica
from farflung.launch.report import in_order, in_short, show
from farflung.observe.folder import make_folder
from farflung.process.failure import OUTER_ASKED, OUTER_ATTACHED, OUTER_ROUND, PREEMPTED
from farflung.process.run_files import LOGS

if TYPE_CHECKING:
    from farflung.launch.agent import Outcome


def launch_script(
    resolved: Resolved, script: str, script_args: tuple[str, ...], *, exec_alone: bool = False, is_inner: bool = False
) -> int:
    """Run a script to its end and return the exit code; with `exec_alone`, one process takes the place of this one.

    `is_inner`: this launcher is under that of replicas.
    """
    with showing(Screen(resolved.settings)):
        return _launch(resolved, script, script_args, exec_alone, is_inner)


def _launch(resolved: Resolved, script: str, script_args: tuple[str, ...], exec_alone: bool, is_inner: bool) -> int:
    settings = resolved.settings
    if resolved.file is not None:
        new = former_files().get(resolved.file)
        advice = f" (this package was called {FORMER_NAME}; rename the file to {new})" if new else ""
        message = f"settings from {resolved.file}{advice}"
        record(Kind.SETTINGS, message=message, file=str(resolved.file))
    for note in resolved.notes:
        record(Kind.NOTE, level=logging.ERROR, message=note)
    if not settings.is_local:
        submit_run = import_module("farflung.launch.engines.submit").submit_run
        return int(submit_run(resolved, script, script_args))
    is_elastic = settings.elastic is not None or settings.join is not None
    if is_elastic and not settings.dry_run:
        code: int = import_module("farflung.launch.replicas").run_replicas(resolved, script, script_args)
        return code
    own = one_replica(settings) if is_elastic else settings
    plan = make_plan(own, script, script_args, reported=is_elastic)
    if settings.as_accelerate:
        more = import_module("farflung.integrations.as_accelerate").path_variables()
        plan = dataclasses.replace(plan, variables={**plan.variables, **more})
    check_recipe(resolved, plan.variables)
    if settings.dry_run:
        click.echo("\n".join(described(resolved, plan)))
        return 0
    if settings.num_machines > 1:
        record(
            Kind.WAITS,
            machine_rank=settings.machine_rank,
            machines=settings.num_machines,
            endpoint=plan.meeting.endpoint,
            interface=str(plan.meeting.interface),
        )
    world: dict[str, Any] = {
        "processes": plan.num_local,
        "machines": settings.num_machines,
        "machine_rank": settings.machine_rank,
    }
    folder = make_folder(resolved, script, script_args, world)
    plan = dataclasses.replace(plan, variables={**plan.variables, **folder.variables})
    if settings.tee != "0" and settings.log_dir is None and folder.path is not None:
        settings = dataclasses.replace(settings, log_dir=str(folder.path / LOGS))
    if plan.alone and exec_alone:
        become(plan)
    size, ranks = plan.num_local * plan.meeting.num_machines, list(plan.ranks)
    record(Kind.STARTED, **world, ranks=ranks, size=size, command=[str(word) for word in plan.command])
    if folder.path is not None:
        EVENTS.addHandler(FolderSink(folder.path))
    try:
        code = start(settings, plan, is_inner)
    except EngineFailure as error:
        code = of_error(error)
        if not settings.json:
            record(Kind.ENDED, code=code)
            raise
        record(Kind.FAILED, message=str(error))
    record(Kind.ENDED, code=code)
    return code


def become(plan: Plan) -> None:
    """Turn this process into the one that the plan asks for; streams, signals and exit code are then the script's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(plan.command[0], plan.command, lone_environment(plan.variables))


def start(settings: LaunchSettings, plan: Plan, is_inner: bool = False) -> int:
    """Run the plan's processes to their end, report a failure, and return the exit code, one of `codes`.

    With `is_inner` a rank that a signal killed is 128 + its number, from which the launcher of replicas knows it.
    """
    outcome: Outcome = import_module("farflung.launch.agent").run_agent(plan, settings)
    for one in outcome.failures:
        record(Kind.LOST, level=FILES_ONLY, rank=one.rank, why=in_short(one), how=one.how)
    if outcome.is_preempted or PREEMPTED in outcome.notes:  # what followed is no failure
        return REQUEUE
    if outcome.failures:
        cause = in_order(outcome.failures)[0][0]
        if cause.cause is Cause.RUN_ENDED:  # under a launcher of replicas, which says so itself
            return cause.shell_code
        interface = plan.meeting.interface
        others_at = None if settings.num_machines == 1 else interface.address if interface else ""
        said = {"finished": outcome.finished, "others_at": others_at, "checkpoint": outcome.checkpoint}
        code = show(outcome.failures, settings.log_dir, **said)
        if outcome.signal is None:
            return code if is_inner and code > BY_SIGNAL else CODES[cause.cause]
    if outcome.signal is not None:
        return BY_SIGNAL + outcome.signal
    if settings.outer_recipe is not None:
        _warn_of_idle_outer(settings, outcome.notes)
    return DONE


def _warn_of_idle_outer(settings: LaunchSettings, notes: Collection[str]) -> None:
    """Say that the outer loop which was asked for did nothing, and why, where that is so."""
    if OUTER_ROUND in notes:
        return
    if OUTER_ATTACHED in notes:
        why = "the script ended before the first round; try a smaller --outer_every"
    elif OUTER_ASKED in notes:
        why = "the script did not prepare a model together with its optimizer (`accelerator.prepare`)"
    else:
        why = "no optimizer made a step"
    record(Kind.WARNING, message=f"warning: --outer {settings.outer_recipe} did nothing: {why}.")
