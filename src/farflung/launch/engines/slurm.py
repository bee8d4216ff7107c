# SPDX-License-Identifier: Apache-2.0
"""Slurm: a fixed run is one job with a launcher on each node, an elastic one an array of jobs, each a replica.

What was submitted lies in the run's folder as `slurm.sh`, where the jobs write `slurm-<job>.out` too. So the folder must
be on a file system that all nodes share, and replicas meet in a folder under it unless `meet` names another place.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, ClassVar, NamedTuple

import click

from farflung.base.errors import ConfigError, did_you_mean
from farflung.base.words import counted
from farflung.launch.codes import BY_SIGNAL, DONE, ENGINE, FAILED, REQUEUE, EngineFailure
from farflung.launch.engines.engine import Job, launcher
from farflung.launch.events import say
from farflung.launch.plan import command_line

_LOOK_S, _ASK_S, _GIVE_UP_S = 0.2, 2.0, 600.0  # into output files; of the controller, which may be away for a while
_ANSWER_WITHIN_S = 60.0
_OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"),
    *("PREEMPTED", "UNKNOWN"),
)
_NO_OUTPUT = BY_SIGNAL + 53  # how Slurm says that it could not open a job's output file
_OF_ONE_MACHINE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108  nothing is written there

# By the keys of `engine_options`: those that sbatch has too, by its names, and ours.
_SBATCH = {
    "partition": "where it waits; several: the first that is free",
    "account": "who is charged",
    "qos": "quality of service",
    "time": "limit of a job, such as 4:00:00",
    "gres": "what each node must have, such as gpu:8",
    "mem": "memory on each node, such as 64G",
    "cpus_per_task": "cores of each launcher and its ranks together",
    "constraint": "features of the nodes",
    "nodelist": "these nodes",
    "exclude": "not these nodes",
    "reservation": "nodes that are reserved",
}
_OURS = {
    "python": "the nodes' Python, else the one that submits",
    "setup": "a line of shell before the launcher, such as module load cuda",
    "signal": "seconds before the time limit at which the run is told to save or to sign out, else 90",
}

_SCRIPT = Template("""\
#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --chdir=$here
#SBATCH --output=$output
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$directives
unset "$${!FARFLUNG_@}"
$before
srun $flags \\
    $command
code=$$?
if [ $$code -eq $again ]; then
    scontrol requeue "$$SLURM_JOB_ID"
fi
exit $$code
""")


class _Task(NamedTuple):
    """A job, or a job of an array, as Slurm has it."""

    state: str
    code: int  # 128 and more: by a signal
    why: str  # it waits or has ended, in one word of Slurm's

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


class Slurm:
    """Submits batch scripts by sbatch, and reads how the jobs are from squeue or, once it has forgotten them, sacct."""

    outlives_launch: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        job.check_options(_SBATCH | _OURS)
        for key in ("signal", "cpus_per_task"):
            if not job.options.get(key, "1").isdecimal():
                raise ConfigError(f"engine_options has {key}={job.options[key]}; use a whole number.")
        settings = job.settings
        place = ("machine_rank", *(("main_process_ip", "main_process_port") if job.is_elastic else ()))
        for name in place:
            if getattr(settings, name):
                instead = "Leave it out; --meet says where replicas meet" if job.is_elastic else "Leave it out"
                raise ConfigError(f"{name} is {getattr(settings, name)}, but Slurm chooses the nodes. {instead}.")
        if "%" in str(job.folder):
            raise ConfigError(f"The run's folder is {job.folder}, but Slurm reads % in names of files as a pattern.")
        self._job = job

    def check(self) -> None:
        """Find out whether there are such a partition, as many nodes, and a folder that they can share."""
        command_line(self._job.settings, self._job.script, self._job.arguments)
        if shutil.which("sbatch") is None:
            raise EngineFailure(
                f"There is no sbatch on {socket.gethostname()}, so nothing can be submitted to Slurm from here. Use a "
                "login node of the cluster."
            )
        partitions: dict[str, list[str]] = {}  # with the host of each node
        for line in _asked("sinfo", "--Node", "--noheader", "--format=%P|%n").splitlines():
            name, _, host = line.partition("|")
            partitions.setdefault(name, []).append(host)
        default = [name for name in partitions if name.endswith("*")]
        asked = [one for one in self._job.options.get("partition", "").split(",") if one] or default
        known = {name.removesuffix("*"): hosts for name, hosts in partitions.items()}
        for name in (one.removesuffix("*") for one in asked):
            if name not in known:
                raise EngineFailure(
                    f"partition is {name!r}, but this cluster has {', '.join(known)}.{did_you_mean(name, known)}"
                )
            if not self._job.is_elastic and self._job.count > len(known[name]):
                raise EngineFailure(
                    f"num_machines is {self._job.count}, but partition {name} has {counted(len(known[name]), 'node')}."
                )
        here, folder = socket.gethostname().partition(".")[0], str(self._job.folder.resolve())
        others = {one for hosts in known.values() for one in hosts if one.partition(".")[0] != here}
        if others and folder.startswith(tuple(f"{place}/" for place in _OF_ONE_MACHINE)):
            raise EngineFailure(
                f"The run's folder is {folder}, which {here} does not share with {min(others)}. Name one with "
                "--run_dir that all nodes can write to."
            )

    def described(self) -> str:
        """Return the batch script."""
        return self._script()

    def submit(self) -> Mapping[str, Any]:
        """Submit one job, or an array of as many as there are replicas."""
        self._path.write_text(self._script(), encoding="utf-8")
        return {"jobs": [self._submitted()], "next": self._job.count}

    def follow(self) -> int:
        """Print the jobs' output as it comes, and each change of their states, until all have ended."""
        settings, tail, seen, answered = (
            self._job.settings,
            _Tail(self._job.folder),
            dict[str, _Task](),
            time.monotonic(),
        )
        while True:
            try:
                tasks = self._tasks()
                answered = time.monotonic()
            except EngineFailure:
                if time.monotonic() - answered > _GIVE_UP_S:
                    raise
                tasks = seen
            for name, task in tasks.items():
                if seen.get(name, task._replace(state=""))[::2] != task[::2]:
                    self._say_state(name, task)
            seen, until = tasks, time.monotonic() + _ASK_S
            is_over = bool(tasks) and all(task.is_over for task in tasks.values())
            while time.monotonic() < until:
                tail.show()
                time.sleep(_LOOK_S)
            if is_over:
                tail.show(is_last=True)
                say(settings, "over", None)
                return self._code(list(tasks.values()))

    def scale(self, count: int) -> str:
        """Submit more jobs, or end the newest ones: those that run sign out, and the others lose nothing."""
        tasks = self._tasks()
        if any(task.state == "COMPLETED" for task in tasks.values()):
            raise EngineFailure(f"{self._job.name} is done: one of its replicas has finished the work.")
        there = sorted((name for name, task in tasks.items() if task.state not in (*_OVER, "COMPLETING")), key=_index)
        if count >= len(there):
            begin = int(self._ticket["next"])
            end = begin + count - len(there)
            if end > begin:
                job = self._submitted(f"--array={begin}-{end - 1}")
                self._job.write({**self._ticket, "jobs": [*self._jobs, job], "next": end})
            return f"{counted(count, 'replica')}, {end - begin} of them submitted now"
        leave = there[count:]
        waiting = [name for name in leave if tasks[name].state == "PENDING"]
        for signal, names in (((), waiting), (("--signal=TERM",), [one for one in leave if one not in waiting])):
            if names:
                _asked("scancel", *signal, *names)
        return f"{counted(count, 'replica')}: {', '.join(leave)} {'ends' if len(leave) == 1 else 'end'}"

    def cancel(self) -> str:
        """End all jobs, by SIGTERM first."""
        _asked("scancel", *self._jobs)
        return f"cancelled {', '.join(self._jobs)}"

    @property
    def _path(self) -> Path:
        return self._job.folder / "slurm.sh"

    @property
    def _ticket(self) -> Mapping[str, Any]:
        """What was submitted so far: another command may have scaled the run since."""
        return Job.read(self._job.folder).ticket or self._job.ticket

    @property
    def _jobs(self) -> list[str]:
        return list(self._ticket.get("jobs", ()))

    def _script(self) -> str:
        job, options = self._job, self._job.options
        own = {key: options[key] for key in _SBATCH if key in options}
        flags = ["--kill-on-bad-exit=0"]
        if "cpus_per_task" in own:
            flags.append(f"--cpus-per-task={own['cpus_per_task']}")  # srun does not inherit it from sbatch
        if job.is_elastic:
            words = job.command(replicas=1, meet=job.settings.meet or f"file://{job.folder}/meet")
            own["array"] = f"0-{job.count - 1}"
        else:
            words = job.command(engine="slurm")  # which has no need of main_process_ip
            flags += ["--label"] if job.count > 1 else []
        if job.is_elastic or job.settings.save_on_signal is not None:  # others would end at it, and early
            own["signal"] = f"USR1@{options.get('signal', 90)}"
        port = "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))"  # so that jobs on one node don't take the same
        is_given = job.is_elastic or job.settings.main_process_port is not None
        before = [line for line in (options.get("setup", ""), "" if is_given else port) if line]
        return _SCRIPT.substitute(
            name=shlex.quote(job.name),
            here=shlex.quote(os.getcwd()),
            output=shlex.quote(f"{job.folder}/slurm-{'%A_%a' if job.is_elastic else '%j'}.out"),
            nodes=1 if job.is_elastic else job.count,
            directives="\n".join(f"#SBATCH --{key.replace('_', '-')}={shlex.quote(own[key])}" for key in own),
            before="\n".join(before),
            flags=shlex.join(flags),
            command=shlex.join(launcher(words, options.get("python", sys.executable))),
            again=REQUEUE,
        )

    def _submitted(self, *flags: str) -> str:
        return _asked("sbatch", "--parsable", *flags, str(self._path)).strip().partition(";")[0]

    def _tasks(self) -> dict[str, _Task]:
        """Return the jobs by their names, `12` or `12_3`; those that Slurm has forgotten are UNKNOWN."""
        named, found = f"--jobs={','.join(self._jobs)}", dict[str, _Task]()
        squeue = (
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            "--Format=JobArrayID:|,State:|,exit_code:|,Reason:|",
        )
        for words in (squeue, ("sacct", "--noheader", "-X", "-P", "--format=JobID,State,ExitCode,Reason")):
            for line in _asked(*words, named, may_forget=True).splitlines():
                name, state, code, why = line.split("|")[:4]
                found.setdefault(name, _Task(state.split()[0], _exit_code(code), why))
            missing = [job for job in self._jobs if job not in {name.partition("_")[0] for name in found}]
            if not missing:
                break
        return found | dict.fromkeys(missing, _Task("UNKNOWN", FAILED, ""))

    def _say_state(self, name: str, task: _Task) -> None:
        why = f" ({task.why})" if task.why not in ("", "None") else ""
        how = f", exit code {task.code}" if task.is_over and task.state != "UNKNOWN" else ""
        if task.code == _NO_OUTPUT:
            how = f": its node can't write into {self._job.folder}, which must be on a file system that all nodes share"
        words = f"{name} is {task.state.lower().replace('_', ' ')}{why}{how}"
        say(self._job.settings, "state", f"job {words}", job=name, state=task.state)

    def _code(self, tasks: Sequence[_Task]) -> int:
        """Return the exit code: an elastic run has ended well if a replica has finished the work."""
        codes = [_code_of(task) for task in tasks]
        return DONE if self._job.is_elastic and DONE in codes else max(codes)


class _Tail:
    """Prints what is added to the output files in a folder, line by line; a job of an array has its number before."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown = folder, dict[Path, int]()

    def show(self, is_last: bool = False) -> None:
        """Print the lines that are whole; the last time, what comes after them too."""
        for path in sorted(self._folder.glob("slurm-*.out"), key=lambda path: _index(path.stem)):
            with path.open("rb") as file:
                file.seek(self._shown.get(path, 0))
                new = file.read()
            whole = new if is_last else new[: new.rfind(b"\n") + 1]
            self._shown[path] = self._shown.get(path, 0) + len(whole)
            task = path.stem.rpartition("_")[2]
            before = f"{task}: " if "_" in path.stem else ""
            for line in whole.decode(errors="replace").splitlines():
                click.echo(before + line)


def _index(name: str) -> tuple[int, ...]:
    """Return the numbers in a name: `slurm-12_10` comes after `slurm-12_9`."""
    return tuple(int(part) for part in name.replace("-", "_").split("_") if part.isdecimal())


def _exit_code(text: str) -> int:
    """Return the exit code that squeue gives as a status of `wait`, and sacct as `code:signal`."""
    code, has_signal, signal = text.partition(":")
    if has_signal:
        return BY_SIGNAL + int(signal) if int(signal) else int(code)
    status = os.waitstatus_to_exitcode(int(code))
    return BY_SIGNAL - status if status < 0 else status


def _code_of(task: _Task) -> int:
    if task.code == _NO_OUTPUT:
        return ENGINE
    return DONE if task.state == "COMPLETED" else task.code or FAILED


def _asked(*words: str, may_forget: bool = False) -> str:
    """Return what a command of Slurm's prints; raise EngineFailure with its words where it refuses.

    `may_forget`: it is asked of jobs that it may know no more, or keeps no account of.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_WITHIN_S)
    except FileNotFoundError:
        raise EngineFailure(f"There is no {words[0]} on {socket.gethostname()}; it is a part of Slurm.") from None
    except subprocess.TimeoutExpired:
        raise EngineFailure(f"{words[0]} gave no answer within {_ANSWER_WITHIN_S:g} s; is slurmctld up?") from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join(line.removeprefix(f"{words[0]}: error: ") for line in done.stderr.strip().splitlines())
    if may_forget and ("Invalid job id" in said or "accounting" in said):
        return done.stdout
    raise EngineFailure(f"{words[0]} refused: {said or f'exit code {done.returncode}'}")
