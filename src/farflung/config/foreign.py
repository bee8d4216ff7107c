# SPDX-License-Identifier: Apache-2.0
"""What Accelerate's launcher and its files know and Farflung's do not do, each with what to use instead."""

from __future__ import annotations

from dataclasses import dataclass

_DDP = "Leave it out to train with DDP."
_SHARD = "Leave it out, and shard models by --use_fsdp."
_MPI = "Start `mpirun -n 4 python train.py` yourself: Farflung reads the variables that mpirun sets."
_NUMA = "Use numactl, or torchrun with --numa-binding."
_PLACE = "Use --main_process_ip and --main_process_port."
_COUNT = "Use --num_processes, which counts the processes of all machines together."


@dataclass(frozen=True)
class Foreign:
    """Something that Farflung does not do."""

    what: str
    instead: str  # what to use
    flags: str  # how the flags begin that ask for it, without `--`; the whole word if it ends in `$`
    keys: str = ""  # of Accelerate's configuration file that belong to it
    idle: str = ""  # what those keys hold when they ask for nothing, besides nothing at all and `false`; in lower case
    # A key and its words with which Accelerate reads those keys; None: no such key.
    read_with: tuple[str | None, ...] = ()
    is_hint: bool = False  # whether results are the same without it, so that a file may ask for it


FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "DeepSpeed",
        _DDP,
        "use_deepspeed deepspeed zero_stage zero3_ offload_",
        keys="deepspeed_config",
        read_with=("distributed_type", None, "deepspeed"),
    ),
    Foreign(
        "sequence parallelism",
        _SHARD,
        "parallelism_config_sp_",
        keys="parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
        idle="deepspeed",
        read_with=("parallelism_config_sp_size",),
    ),
    Foreign(
        "Megatron-LM",
        _DDP,
        "use_megatron_lm megatron_lm_",
        keys="megatron_lm_config",
        read_with=("distributed_type", None, "megatron_lm"),
    ),
    Foreign(
        "fp8 by TransformerEngine or MS-AMP",
        "Use --mixed_precision fp8 alone, which is torchao's (`backend: AO`).",
        "fp8_",
        keys="fp8_config",
        idle="ao true",  # torchao's own two settings change speed and memory alone
        read_with=("mixed_precision", "fp8"),
    ),
    Foreign(
        "TPUs",
        "Use torch_xla's own launcher.",
        "tpu no_tpu_cluster vm$ env$ downcast_bf16",
        keys="downcast_bf16 commands command_file tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_cluster tpu_vm "
        "tpu_env",
        idle="no",
        read_with=("distributed_type", None, "xla", "tpu"),
    ),
    Foreign("SageMaker", "Start `farflung launch` inside the job.", "aws_", "compute_environment", "local_machine"),
    Foreign("starting mpirun", _MPI, "mpirun_", "mpirun_config", idle="1"),
    Foreign("binding processes to NUMA nodes", _NUMA, "enable_cpu_affinity", "enable_cpu_affinity", is_hint=True),
    Foreign("IPEX", "PyTorch itself has these optimizations now.", "ipex use_xpu", "ipex_config", is_hint=True),
    Foreign("tensor parallelism", _SHARD, "tp_ use_tp", keys="tp_config", idle="1"),
    Foreign("torchrun's way of counting processes", _COUNT, "nproc_per_node"),
    Foreign("torchrun's way of counting ranks", "Use --only_rank, for ranks of the run.", "local_ranks_filter"),
    Foreign("torchrun's names", "Use --num_machines and --machine_rank.", "nnodes node_rank"),
    Foreign("torchrun's names", _PLACE, "master_ rdzv_endpoint standalone"),
)


def foreign_flag(word: str) -> Foreign | None:
    """Return what the flag `--word` asks for, when it is one that Farflung does not do."""
    begins = ((entry, begin) for entry in FOREIGN for begin in entry.flags.split())
    return next((entry for entry, begin in begins if f"{word}$".startswith(begin)), None)


FOREIGN_KEYS: dict[str, Foreign] = {key: entry for entry in FOREIGN for key in entry.keys.split()}

# What Accelerate's `distributed_type` says of the run, and what it asks for that is not done.
DISTRIBUTED_TYPES: dict[str, dict[str, bool]] = {
    "NO": {},
    "MULTI_CPU": {"use_cpu": True},
    "MULTI_GPU": {"multi_gpu": True},
    "FSDP": {"use_fsdp": True},
}
