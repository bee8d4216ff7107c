# SPDX-License-Identifier: Apache-2.0
"""The groups in which help and pages list the launch settings, and the ten that people need first."""

from __future__ import annotations

from typing import NamedTuple


class FlagGroup(NamedTuple):
    """Settings that belong together."""

    about: str  # in one line
    begins: tuple[str, ...]  # the settings' names, or how they begin


GROUPS: dict[str, FlagGroup] = {
    "processes": FlagGroup(
        "CPU or GPUs, and how many processes", ("use_cpu", "num_processes", "num_cpu", "multi_", "gpu_")
    ),
    "machines": FlagGroup(
        "several machines and how they find each other",
        ("num_machines", "machine_rank", "main_process_", "network_interface", "same_network", "rdzv_"),
    ),
    "engines": FlagGroup("what starts the processes: ssh, Slurm, Ray, Kubernetes", ("engine", "hosts", "sync")),
    "script": FlagGroup(
        "what is started, and the file of settings",
        ("module", "no_python", "as_accelerate", "main_training_function", "config_file", "dry_run"),
    ),
    "precision": FlagGroup("mixed precision, accumulation and clipping", ("mixed_precision", "gradient_")),
    "outer": FlagGroup("replicas that synchronize every H steps: recipes and their options", ("outer_",)),
    "elastic": FlagGroup(
        "replicas that fail, leave and join at any time",
        ("elastic", "replicas", "ranks_per_", "grace_s", "join", "meet", "heartbeat_s", "state_every", "key_file"),
    ),
    "sharding": FlagGroup(
        "FSDP, the grid of copies and shards, islands",
        ("use_fsdp", "fsdp_", "use_parallelism_", "parallelism_", "island_size"),
    ),
    "compile": FlagGroup("torch.compile", ("dynamo_",)),
    "failures": FlagGroup(
        "time-outs, restarts, signals and checks",
        ("hang_timeout_s", "max_restarts", "save_on_signal", "monitor_", "debug"),
    ),
    "logs": FlagGroup(
        "what is printed and what is kept", ("log_dir", "run_dir", "tee", "role", "quiet", "only_rank", "json")
    ),
}
FIRST = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "mixed_precision", "outer_recipe"),
    *("outer_every", "elastic", "config_file", "dry_run"),
)


def group_of(name: str) -> str:
    """Return the group of the setting called `name`; raise KeyError if it has none, or several."""
    groups = [group for group, each in GROUPS.items() if name.startswith(each.begins)]
    if len(groups) != 1:
        raise KeyError(f"{name} must be in one of GROUPS, and is in {groups}.")
    return groups[0]
