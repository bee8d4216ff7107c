# SPDX-License-Identifier: Apache-2.0
"""What Accelerate's launcher and its files know and Farflung's do not do, each with what to use instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """Something that Farflung does not do."""

    what: str
    instead: str  # what to use
    flags: str = ""  # how the flags begin that ask for it, without `--`; the whole word where it ends in `$`
    keys: str = ""  # of Accelerate's configuration file that belong to it
    idle: str = ""  # what those keys hold when they ask for nothing, besides nothing at all and `false`; in lower case

    def owns_flag(self, word: str) -> bool:
        """Whether the flag `--word` asks for this."""
        return any(word == p[:-1] if p.endswith("$") else word.startswith(p) for p in self.flags.split())


FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "DeepSpeed",
        "Leave it out to train with DDP.",
        flags="use_deepspeed deepspeed zero_stage zero3_ offload_",
        keys="deepspeed_config",
    ),
    Foreign(
        "context parallelism",
        "Leave it out, and shard models by --use_fsdp.",
        flags="parallelism_config_cp_",
        keys="parallelism_config_cp_backend parallelism_config_cp_comm_strategy",
        idle="torch allgather alltoall",
    ),
    Foreign(
        "sequence parallelism",
        "Leave it out, and shard models by --use_fsdp.",
        flags="parallelism_config_sp_",
        keys="parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
        idle="deepspeed",
    ),
    Foreign(
        "Megatron-LM",
        "Leave it out to train with DDP.",
        flags="use_megatron_lm megatron_lm_",
        keys="megatron_lm_config",
    ),
    Foreign("fp8", "Use --mixed_precision bf16.", flags="fp8_", keys="fp8_config"),
    Foreign(
        "TPUs",
        "Use torch_xla's own launcher.",
        flags="tpu no_tpu_cluster vm$ env$ downcast_bf16",
        keys="downcast_bf16 commands command_file tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env",
        idle="no",
    ),
    Foreign(
        "SageMaker",
        "Start `farflung launch` inside the job.",
        flags="aws_",
        keys="compute_environment",
        idle="local_machine",
    ),
    Foreign(
        "starting mpirun",
        "Start `mpirun -n 4 python train.py` yourself: Farflung reads the variables that mpirun sets.",
        flags="mpirun_",
        keys="mpirun_config",
    ),
    Foreign(
        "binding processes to NUMA nodes",
        "Use numactl, or torchrun with --numa-binding.",
        flags="enable_cpu_affinity",
        keys="enable_cpu_affinity",
    ),
    Foreign("IPEX", "PyTorch itself has these optimizations now.", flags="ipex use_xpu", keys="ipex_config"),
    Foreign(
        "torchrun's way of counting processes",
        "Use --num_processes, which counts the processes of all machines together.",
        flags="nproc_per_node local_ranks_filter",
    ),
    Foreign("torchrun's names", "Use --num_machines and --machine_rank.", flags="nnodes node_rank"),
    Foreign(
        "torchrun's names", "Use --main_process_ip and --main_process_port.", flags="master_ rdzv_endpoint standalone"
    ),
)


def foreign_flag(word: str) -> Foreign | None:
    """Return what the flag `--word` asks for, when it is one that Farflung does not do."""
    return next((entry for entry in FOREIGN if entry.owns_flag(word)), None)


def foreign_key(key: str) -> Foreign | None:
    """Return what the key of a configuration file belongs to, when that is something that Farflung does not do."""
    return next((entry for entry in FOREIGN if key in entry.keys.split()), None)


FOREIGN_KEYS: tuple[str, ...] = tuple(key for entry in FOREIGN for key in entry.keys.split())

# What Accelerate's `distributed_type` says of the run, and what it asks for that is not done.
DISTRIBUTED_TYPES: dict[str, dict[str, bool]] = {
    "NO": {},
    "MULTI_CPU": {"use_cpu": True},
    "MULTI_GPU": {"multi_gpu": True},
    "FSDP": {"use_fsdp": True},
}
