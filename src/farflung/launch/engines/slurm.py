# SPDX-License-Identifier: Apache-2.0
"""Slurm: a fixed run is one job with a launcher on each node, an elastic one an array of jobs, each a replica.

The run's folder has what was submitted, `slurm.sh`, and what the jobs print, `slurm-<job>.out`. So all nodes must share
it, and replicas meet in a folder under it, unless `meet` names another place.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any, ClassVar, NamedTuple

from farflung.base.errors import ConfigError, FarflungError, did_you_mean
from farflung.base.events import Kind, record
from farflung.base.words import counted
from farflung.comm.patience import waiting
from farflung.launch.codes import BY_SIGNAL, DONE, ENGINE, FAILED, REQUEUE, EngineFailure
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.events import pass_on
from farflung.launch.plan import command_line
from farflung.launch.shell import sh_text, shell_line
from farflung.observe.run import ObservedRun

# Keys of `engine_options`: sbatch's own, by its names, and those of the batch script.
_SBATCH = (
    *("partition", "account", "qos", "time", "gres", "mem", "cpus_per_task", "constraint", "nodelist", "exclude"),
    "reservation",
)
_OURS = ("python", "setup", "signal")
_LOOK_S, _ASK_S, _ANSWER_WITHIN_S = 0.2, 2.0, 60.0  # at output files; for states
_AWAY_S = 600.0  # for how long slurmctld may be away, such as while it is started again
_OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"),
    "PREEMPTED",
)
_NO_OUTPUT = BY_SIGNAL + 53  # what Slurm gives a job whose output file it can't open
_OF_ONE_MACHINE = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")

_SCRIPT = Template("""\
#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --output=$output
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$directives
unset TORCHELASTIC_RUN_ID "$${!FARFLUNG_@}"
$enter
$setup
srun $flags \\
    $command
code=$$?
if [ $$code -eq $again ]; then
    scontrol requeue "$job"
fi
exit $$code
""")


class _JobState(NamedTuple):
    """The state of a job, or of one of an array."""

    state: str
    code: int = 0
    why: str = ""  # it waits or has ended, in a word of Slurm's

    @classmethod
    def of(cls, state: str, status: str, why: str) -> _JobState:
        """Read what squeue prints; `status` is one of `wait`."""
        code = os.waitstatus_to_exitcode(int(status))
        return cls(state, BY_SIGNAL - code if code < 0 else code or (state != "COMPLETED") * FAILED, why)


class Slurm:
    """Submits batch scripts by sbatch, and follows their jobs by squeue and by what they print."""

    outlives_launch: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        self._job, self._jobs, self._shown = job, list[str](), dict[Path, int]()  # bytes of output files
        if not job.handle:
            self._check_settings()

    def _check_settings(self) -> None:
        job = self._job
        job.check_options((*_SBATCH, *_OURS), numbers=("signal", "cpus_per_task"))
        if "signal" in job.options and not _heeds_signals(job):
            raise ConfigError(
                "engine_options has signal, at which only a run with --save_on_signal or --elastic saves."
            )
        job.check_key("A batch script would show it: have --key_file name a file that all nodes can read.")
        placed = ("machine_rank", "main_process_ip", "main_process_port") if job.is_elastic else ("machine_rank",)
        instead = " --meet says where replicas meet." if job.is_elastic else ""
        job.check_left_out(placed, f"Slurm chooses the nodes. Leave it out.{instead}")
        if odd := {*"\\%"} & {*str(job.folder)}:  # also in the path of a job's folder, which can't be quoted
            raise ConfigError(
                f"The run's folder is {str(job.folder)!r}, but Slurm takes {' and '.join(sorted(odd))} in names of "
                "output files for patterns of its own. Name a folder without by --run_dir."
            )
        for key, value in job.options.items():
            if key in _SBATCH and not value.isprintable():
                raise ConfigError(f"engine_options has {key}={value!r}; a directive of sbatch is one line.")

    def check(self) -> None:
        """Find out whether there are such a partition, as many nodes, and a folder that they can share."""
        command_line(self._job.settings, self._job.script, self._job.arguments)
        here, folder = socket.gethostname(), str(self._job.folder.resolve())
        if shutil.which("sbatch") is None:
            raise EngineFailure(f"There is no sbatch on {here}. Submit from a login node of the cluster.")
        partitions: dict[str, list[str]] = {}  # the host of each node
        for line in _run("sinfo", "--Node", "--noheader", "--format=%P|%n").splitlines():
            name, _, host = line.partition("|")
            partitions.setdefault(name, []).append(host)
        default = ",".join(name for name in partitions if name.endswith("*"))
        known = {name.removesuffix("*"): hosts for name, hosts in partitions.items()}
        for name in self._job.options.get("partition", default.removesuffix("*")).split(","):
            if name not in known:
                listed = f"{', '.join(sorted(known))}.{did_you_mean(name, known)}"
                raise EngineFailure(f"partition is {name!r}, but this cluster has {listed}")
            if not self._job.is_elastic and self._job.count > len(known[name]):
                there = counted(len(known[name]), "node")
                raise EngineFailure(f"num_machines is {self._job.count}, but partition {name} has {there}.")
        other = next((host for hosts in known.values() for host in hosts if host != here), None)
        if other and folder.startswith(_OF_ONE_MACHINE):
            raise EngineFailure(
                f"The run's folder is {folder}, which {here} does not share with {other}. Name one with --run_dir that "
                "all nodes can write to."
            )

    def described(self) -> str:
        return batch_script(self._job)

    def submit(self) -> Mapping[str, Any]:
        (self._job.folder / "slurm.sh").write_text(batch_script(self._job), encoding="utf-8")
        handle = {"jobs": [self._submitted()], "next": self._job.count}
        self._job = replace(self._job, handle=handle)
        return handle

    def follow(self) -> int:
        """Print what the jobs print, and their states whenever these change."""
        seen, answered_at = dict[str, _JobState](), time.monotonic()
        while True:
            try:
                states, answered_at = self._states(), time.monotonic()
            except EngineFailure:
                if time.monotonic() > answered_at + _AWAY_S:
                    raise
                states = seen
            for name, job in states.items():
                if name not in seen or (job.state, job.why) != (seen[name].state, seen[name].why):
                    self._report(name, job)
            is_over = bool(states) and all(job.state in _OVER for job in states.values())
            seen = states
            for _ in waiting(_LOOK_S, _ASK_S):
                self._print_output()
            if is_over:
                self._print_output(is_last=True)
                codes = [ENGINE if job.code == _NO_OUTPUT else job.code for job in states.values()]
                return DONE if DONE in codes else max(codes)  # a fixed run has one

    def scale(self, count: int) -> str:
        """Submit more replicas, or end the newest ones, which sign out if they run."""
        states, handle = self._states(), self._handle
        if any(job.state == "COMPLETED" for job in states.values()):
            raise EngineFailure(f"The work of {self._job.name} is done: a replica of it has finished.")
        there = sorted((name for name, job in states.items() if job.state not in (*_OVER, "COMPLETING")), key=_numbers)
        begin, more = handle["next"], count - len(there)
        if more > 0:
            jobs = [*handle["jobs"], self._submitted(f"--array={begin}-{begin + more - 1}")]
            self._job.write({"jobs": jobs, "next": begin + more})
        for name in there[count:]:
            _run("scancel", *([] if states[name].state == "PENDING" else ["--signal=TERM"]), name)
        done = f"{more} submitted" if more > 0 else f"{', '.join(there[count:]) or 'none'} ended"
        return f"{counted(count, 'replica')}: {done}"

    def cancel(self) -> str:
        """End all jobs: SIGTERM, and SIGKILL after the cluster's KillWait."""
        _run("scancel", *self._handle["jobs"])
        return f"cancelled {', '.join(self._handle['jobs'])}"

    @property
    def _handle(self) -> Mapping[str, Any]:
        """What was submitted so far: another command may have scaled the run meanwhile."""
        with suppress(FarflungError):  # a disk that was full when it was to be written
            return Job.read(self._job.folder).handle or self._job.handle
        return self._job.handle

    def _submitted(self, *flags: str) -> str:
        folder = self._job.folder  # where output files are, as names of files have patterns in a directive
        words = ("sbatch", "--parsable", f"--chdir={folder}", *flags, f"{folder}/slurm.sh")
        return _run(*words).strip().partition(";")[0]

    def _states(self) -> dict[str, _JobState]:
        """Return the jobs by their names, 12 or 12_3. Of one that Slurm has forgotten, launchers have told the end."""
        self._jobs, found = self._handle["jobs"], dict[str, _JobState]()
        named = ("--noheader", "--array", "--states=all", f"--jobs={','.join(self._jobs)}")
        for line in _run("squeue", *named, "--Format=JobArrayID:|,State:|,exit_code:|,Reason:|").splitlines():
            name, *row = line.split("|")[:4]
            found[name] = _JobState.of(*row)
        forgotten = {*self._jobs} - {name.partition("_")[0] for name in found}
        if forgotten:
            run = ObservedRun(self._job.folder)
            ends = [event.facts["code"] for event in run.current if event.kind is Kind.ENDED]
            known = DONE if self._job.is_elastic and DONE in ends else run.code_so_far
            code = FAILED if known is None else known
            found |= dict.fromkeys(forgotten, _JobState("FAILED" if code else "COMPLETED", code, "forgotten"))
        return found

    def _report(self, name: str, job: _JobState) -> None:
        message = f"job {name} is {job.state.lower().replace('_', ' ')}"
        message += f", exit code {job.code}" if job.state in _OVER else ""
        message += f" ({job.why})" if job.why not in ("", "None") else ""
        if job.code == _NO_OUTPUT:
            message += f": its node can't write into {self._job.folder}, which all nodes must share"
        record(Kind.STATE, message=message, job=name, state=job.state)

    def _print_output(self, is_last: bool = False) -> None:
        """Print the lines that were added to output files, those of a job of an array with its number."""
        files = [file for job in self._jobs for file in self._job.folder.glob(f"slurm-{job}[._]*")]
        for path in sorted(files, key=lambda path: _numbers(path.stem)):
            new = b""
            with suppress(OSError), path.open("rb") as file:  # the next look may find it again
                file.seek(self._shown.get(path, 0))
                new = file.read()
            whole = new if is_last else new[: new.rfind(b"\n") + 1]
            self._shown[path] = self._shown.get(path, 0) + len(whole)
            number = f"{path.stem.rpartition('_')[2]}: " if "_" in path.stem else ""
            for line in whole.removesuffix(b"\n").split(b"\n") if whole else ():
                pass_on(b"%s%s\n" % (number.encode(), line), sys.stdout)


def _numbers(name: str) -> tuple[int, ...]:
    """Return the numbers in a name, by which `12_10` comes after `12_9`."""
    return tuple(int(part) for part in name.replace("-", "_").split("_") if part.isdecimal())


def _run(*words: str) -> str:
    """Return what a command of Slurm's prints, or raise EngineFailure with what it says."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=_ANSWER_WITHIN_S, text=True, errors="replace")
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise EngineFailure(f"{words[0]}, a command of Slurm's, gave no answer: {error}.") from None
    message = " ".join(line.removeprefix(f"{words[0]}: error: ") for line in done.stderr.strip().splitlines())
    if done.returncode and "Invalid job id" not in message:
        raise EngineFailure(f"{words[0]} refused: {message or f'exit code {done.returncode}'}")
    return done.stdout


def _heeds_signals(job: Job) -> bool:
    return job.is_elastic or job.settings.save_on_signal is not None


def batch_script(job: Job) -> str:
    """Return the batch script: on each node a launcher; a job that ends with REQUEUE goes back into the queue."""
    options = job.options
    directives = {key: options[key] for key in _SBATCH if key in options}
    flags = ["--kill-on-bad-exit=0"]
    if "cpus_per_task" in directives:  # which srun does not take over from sbatch
        flags.append(f"--cpus-per-task={directives['cpus_per_task']}")
    if job.is_elastic:
        directives["array"] = f"0-{job.count - 1}"
        words = job.command(replicas=1, meet=job.settings.meet or (job.folder / "meet").as_uri())
    else:
        words = job.command(engine="slurm")  # which has no need of main_process_ip
        flags += ["--label"] if job.count > 1 else []
    if _heeds_signals(job):  # it would end any other run
        directives["signal"] = f"USR1@{options.get('signal', 90)}"
    return _SCRIPT.substitute(
        name=re.sub(r"[^\w.+-]", "_", job.name, flags=re.ASCII),
        output=f"slurm-{'%A_%a' if job.is_elastic else '%j'}.out",  # in the run's folder, where sbatch is called
        enter=sh_text(f"cd {shlex.quote(os.getcwd())} || exit {ENGINE}"),
        nodes=1 if job.is_elastic else job.count,
        directives="\n".join(f"#SBATCH --{key.replace('_', '-')}={shlex.quote(directives[key])}" for key in directives),
        setup=options.get("setup", ""),
        flags=shlex.join(flags),
        command=shell_line(launcher_command(words, options.get("python", sys.executable))),
        again=REQUEUE,
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.is_elastic else "$SLURM_JOB_ID",  # of one: the array's
    )
