# SPDX-License-Identifier: Apache-2.0
"""The batch script of a run on Slurm, and the options that it is made from."""

from __future__ import annotations

import os
import re
import shlex
import sys
from string import Template

from farflung.base.errors import ConfigError
from farflung.launch.codes import ENGINE, REQUEUE
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.shell import sh_text, shell_line

# The keys of `engine_options`: those of sbatch, by its names, and ours.
_SBATCH = {
    "partition": "where it waits",
    "account": "who pays",
    "qos": "quality of service",
    "time": "limit of each job: 4:00:00",
    "gres": "what each node must have: gpu:8",
    "mem": "memory on each node: 64G",
    "cpus_per_task": "cores on each node",
    "constraint": "features of the nodes",
    "nodelist": "these nodes",
    "exclude": "not these nodes",
    "reservation": "nodes that are reserved",
}
_OURS = {
    "python": "the nodes' Python, else the one that submits",
    "setup": "a line of shell before the launcher: module load cuda",
    "signal": "seconds before the limit at which the run saves or signs out, else 90",
}

_SCRIPT = Template("""\
#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --output=$output
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$directives
unset "$${!FARFLUNG_@}"
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


def check_options(job: Job) -> None:
    """Raise ConfigError for unknown options, and for settings that say what Slurm decides."""
    if job.handle:
        return
    job.check_options(_SBATCH | _OURS, numbers=("signal", "cpus_per_task"))
    if "signal" in job.options and not _heeds_signals(job):
        raise ConfigError("engine_options has signal, at which only a run with --save_on_signal or --elastic saves.")
    job.check_key("A batch script would show it: have --key_file name a file that all nodes can read.")
    placed = ("machine_rank", "main_process_ip", "main_process_port") if job.is_elastic else ("machine_rank",)
    instead = " --meet says where replicas meet." if job.is_elastic else ""
    job.check_left_out(placed, f"Slurm chooses the nodes. Leave it out.{instead}")
    if odd := {*"\\%"} & {*str(job.folder)}:  # also in the path of a job's folder, which can't be quoted
        raise ConfigError(
            f"The run's folder is {str(job.folder)!r}, but Slurm takes {' and '.join(sorted(odd))} in names of output "
            "files for patterns of its own. Name a folder without by --run_dir."
        )
    for key, value in job.options.items():
        if key in _SBATCH and not value.isprintable():
            raise ConfigError(f"engine_options has {key}={value!r}; a directive of sbatch is one line.")


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
