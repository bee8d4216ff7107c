# SPDX-License-Identifier: Apache-2.0
"""What `farflung launch --dry-run` prints: what would be started here, with which variables, and why."""

from __future__ import annotations

import shlex

from farflung.base.words import counted, listed
from farflung.config import environ
from farflung.config.resolve import Resolved
from farflung.launch.plan import Plan, lone_environment, num_replicas
from farflung.launch.shell import shell_line


def described(resolved: Resolved, plan: Plan) -> str:
    """Return the text; `plan` is of this machine or, with replicas that come and go, of each of them."""
    settings = resolved.settings
    lines = ["nothing is started (--dry-run)", f"command: {shell_line([*map(str, plan.command)])}"]
    is_elastic = settings.elastic is not None or settings.join is not None
    if is_elastic:
        count = counted(num_replicas(settings), "replica")
        where = settings.join or settings.meet or "a port of this machine"
        lines.append(f"replicas: {count} on this machine, which meet at {where}; each is a world of its own")
    lines += [_ranks(plan)] if is_elastic and plan.alone else [_ranks(plan), _meeting(plan)]
    before = environ.snapshot()
    known = lone_environment(plan.variables) if plan.alone else plan.variables
    variables = {name: value for name, value in known.items() if before.get(name) != value or name in plan.variables}
    lines += ["environment:", *(f"  {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))]
    rows = [(f"  {name}: {value}", origin) for name, value, origin in resolved.rows()]
    lines += ["settings that are not defaults:", *(f"{line:<40} # {origin}" for line, origin in rows)]
    return "\n".join(lines)


def _ranks(plan: Plan) -> str:
    size = plan.num_local * plan.meeting.num_machines
    if plan.meeting.backend != "static" and plan.meeting.num_machines > 1:
        return f"ranks: {plan.num_local} of {size}, which the rendezvous numbers"
    return f"ranks: {listed(plan.ranks)} of {size} (RANK, WORLD_SIZE)"


def _meeting(plan: Plan) -> str:
    if plan.alone:
        return "meeting: none, as one process alone takes the place of the launcher"
    return f"meeting: {plan.meeting.endpoint}{' (any free port)' if plan.meeting.endpoint.endswith(':0') else ''}"
