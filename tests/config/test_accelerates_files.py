# SPDX-License-Identifier: Apache-2.0
"""Files as Accelerate's commands, docs and users write them, from 0.5 to 1.15: all are read but what can't be done."""

from typing import Any

import pytest

from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ
from farflung.config.launch import rank_variables
from farflung.config.resolve import Resolved, resolve
from farflung.config.sharding import FullyShardedDataParallelPlugin

# What `accelerate config` ends with, whatever the answers.
TAIL = """
machine_rank: 0
main_training_function: main
num_machines: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
"""
FSDP_1 = """distributed_type: FSDP
num_processes: 4
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
"""
FSDP_2 = """distributed_type: FSDP
num_processes: 4
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 100000
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
"""
# name -> the file; settings that it makes; words of each line that is said of it
FILES: dict[str, tuple[Any, ...]] = {
    "config default, 1.15": (
        '{"compute_environment": "LOCAL_MACHINE", "debug": false, "distributed_type": "NO", "downcast_bf16": false, '
        '"enable_cpu_affinity": false, "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", '
        '"num_machines": 1, "num_processes": 1, "rdzv_backend": "static", "same_network": false, "tpu_use_cluster": '
        'false, "tpu_use_sudo": false, "use_cpu": true}',
        {"num_processes": 1, "use_cpu": True, "mixed_precision": "no"},
    ),
    "config, 1.15": (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_CPU\ndowncast_bf16: 'no'\n"
        "enable_cpu_affinity: false\nfsdp_config: {}\ndynamo_config:\n  dynamo_backend: 'NO'\n"
        "mixed_precision: bf16\nnum_processes: 2\nuse_cpu: true" + TAIL,
        {"mixed_precision": "bf16", "num_processes": 2, "use_cpu": True, "debug": False, "dynamo_backend": "no"}
        | {"machine_rank": 0, "num_machines": 1, "rdzv_backend": "static", "same_network": True},
    ),
    "0.5: fp16": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nfp16: true\nmachine_rank: 0\n"
        "main_process_ip: null\nmain_process_port: null\nnum_machines: 1\nnum_processes: 2\n",
        {"mixed_precision": "fp16", "multi_gpu": True, "num_processes": 2},
    ),
    "0.5: no fp16": ("distributed_type: 'NO'\nfp16: false\nnum_processes: 1\n", {"mixed_precision": "no"}),
    "0.7: FSDP without prefixes": (
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config: {}\ndistributed_type: FSDP\nfsdp_config:\n"
        "  min_num_params: 0\n  offload_params: false\n  sharding_strategy: 1\nnum_processes: 2\n",
        {"use_fsdp": True, "fsdp_min_num_params": 0},
    ),
    "0.12: FSDP": (
        "distributed_type: FSDP\ndowncast_bf16: 'no'\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n  fsdp_offload_params: false\n  fsdp_sharding_strategy: 2\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: T5Block\nnum_processes: 2\n",
        {"fsdp_sharding_strategy": "2"},
    ),
    "0.14: commands of TPUs on another machine": (
        "distributed_type: 'NO'\ncommand_file: setup.sh\ncommands: null\ntpu_name: pod\ntpu_zone: us-central1-a\n"
        "gpu_ids: all\nmegatron_lm_config: {}\nuse_cpu: false\n",
        {"gpu_ids": "all"},
        "`command_file` is not read",
        "`tpu_name` is not read",
        "`tpu_zone` is not read",
    ),
    "0.15: dynamo_backend": (
        "distributed_type: MULTI_CPU\ndynamo_backend: INDUCTOR\nnum_processes: 2\nuse_cpu: true\n",
        {"dynamo_backend": "inductor", "use_cpu": True},
    ),
    "0.15: no dynamo_backend": ("distributed_type: 'NO'\ndynamo_backend: 'NO'\n", {"dynamo_backend": "no"}),
    "0.17: dynamo_config": (
        "distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config:\n  dynamo_backend: AOT_EAGER\n"
        "  dynamo_mode: reduce-overhead\n  dynamo_use_dynamic: true\n  dynamo_use_fullgraph: false\n",
        {"dynamo_backend": "aot_eager", "dynamo_mode": "reduce-overhead", "dynamo_use_fullgraph": False},
    ),
    "0.20: IPEX": (
        "distributed_type: MULTI_CPU\nipex_config:\n  ipex: true\n  use_xpu: false\nnum_processes: 2\nuse_cpu: true\n",
        {"num_processes": 2},
        "`ipex_config` asks for IPEX",
    ),
    "0.28: mpirun, not used": (
        "distributed_type: MULTI_CPU\nmpirun_config: {mpirun_ccl: '1', mpirun_hostfile: null}\nnum_processes: 2\n",
        {"use_cpu": True},
    ),
    "0.29: CPU affinity": (
        "distributed_type: MULTI_GPU\nenable_cpu_affinity: true\nnum_processes: 2" + TAIL,
        {"multi_gpu": True},
        "`enable_cpu_affinity` asks for binding processes to NUMA nodes",
    ),
    "0.34: fp8_config beside another precision": (
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nfp8_config:\n  backend: TE\n  fp8_format: E4M3\n"
        "num_processes: 2\n",
        {"mixed_precision": "bf16"},
        "`fp8_config` is not read, as mixed_precision is bf16",
    ),
    "1.0: FSDP": (FSDP_1 + "mixed_precision: bf16" + TAIL, {"fsdp_cpu_ram_efficient_loading": True}),
    "1.4: tp_config": ("distributed_type: MULTI_GPU\ntp_config:\n  tp_size: 1\nnum_processes: 2\n", {}),
    "1.6: FSDP 1 by fsdp_reshard_after_forward": (
        FSDP_1.replace("fsdp_sharding_strategy", "fsdp_version: 1\n  fsdp_reshard_after_forward"),
        {"fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD"},
    ),
    "1.6: FSDP 2": (FSDP_2 + TAIL, {"fsdp_version": 2, "fsdp_min_num_params": 100_000}),
    "1.10: a grid": (
        "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_cp_size: 1\n"
        "  parallelism_config_cp_comm_strategy: alltoall\n  parallelism_config_dp_replicate_size: 2\n"
        "  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 1\n"
        "  parallelism_config_sp_seq_length: 2048\n  parallelism_config_sp_size: 1\n",
        {"parallelism_config_dp_shard_size": 4, "use_parallelism_config": True},
        "`parallelism_config_sp_seq_length` is not read",
    ),
    "several machines": (
        "distributed_type: MULTI_GPU\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 9999\n"
        "num_machines: 2\nnum_processes: 8\nrdzv_backend: c10d\nsame_network: false\n",
        {"num_machines": 2, "machine_rank": 1, "rdzv_backend": "c10d"},
    ),
    "YAML's other words": (
        "distributed_type: no\nmixed_precision: no\nuse_cpu: yes\ndebug: off\nsame_network: Yes\ndowncast_bf16: no\n",
        {"use_cpu": True, "debug": False, "same_network": True, "mixed_precision": "no"},
    ),
    "config update of YAML's other words": (
        "distributed_type: false\nmixed_precision: false\ndynamo_backend: false\nuse_cpu: true\ndowncast_bf16: false\n",
        {"mixed_precision": "no", "dynamo_backend": "no"},
    ),
    "a key twice with one value": (
        FSDP_1 + "num_processes: 4\nfsdp_config:\n  fsdp_offload_params: false\ndeepspeed_config: {}\n"
        "deepspeed_config: {}\n",
        {"num_processes": 4, "fsdp_offload_params": False},
    ),
    "null and false for what is gone": (
        "distributed_type: MULTI_CPU\nuse_mps_device: false\nipex_config: null\ntp_config: null\nzeros: null\n"
        "num_processes: 2\nfsdp_config:\n  fsdp_tensor_layout: null\n",
        {"num_processes": 2},
    ),
    "hints of FSDP": (
        FSDP_1.replace("prefetch: false", "prefetch: true").replace("BACKWARD_PRE", "BACKWARD_POST")
        + "  fsdp_limit_all_gathers: false\n",
        {"fsdp_forward_prefetch": None, "fsdp_backward_prefetch": None, "fsdp_limit_all_gathers": None},
        "fsdp_backward_prefetch is 'BACKWARD_POST'",
        "fsdp_forward_prefetch is True",
        "fsdp_limit_all_gathers is False",
    ),
    "hints as they are": (FSDP_1 + "  fsdp_limit_all_gathers: true\n", {"fsdp_limit_all_gathers": True}),
    "a strategy beside version 2": (FSDP_2 + "  fsdp_sharding_strategy: FULL_SHARD\n", {}),
    "another strategy beside version 2": (
        FSDP_2 + "  fsdp_sharding_strategy: HYBRID_SHARD\n",
        {"fsdp_sharding_strategy": None},
        "fsdp_sharding_strategy is HYBRID_SHARD, which is for version 1",
    ),
    "HYBRID_SHARD on one machine": (
        FSDP_1.replace("FULL_SHARD", "HYBRID_SHARD"),
        {"fsdp_reshard_after_forward": "true", "use_parallelism_config": None},
        "on one machine, models are sharded over all processes",
    ),
    "a number of ranks to reshard over is no strategy": (
        FSDP_2.replace("reshard_after_forward: true", "reshard_after_forward: 4"),
        {"fsdp_reshard_after_forward": "4"},
    ),
    "HYBRID_SHARD of version 1": (
        FSDP_2.replace("reshard_after_forward: true", "reshard_after_forward: HYBRID_SHARD").replace("on: 2", "on: 1"),
        {"fsdp_reshard_after_forward": "true"},
        "on one machine",
    ),
    "HYBRID_SHARD on two": (
        FSDP_1.replace("FULL_SHARD", "HYBRID_SHARD_ZERO2") + "num_machines: 2\nmain_process_ip: node0\n",
        {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2},
        "2 copies of the model, each sharded over 2 processes",
    ),
    "blocks of another distributed_type": (
        FSDP_1.replace("FSDP", "MULTI_GPU", 1) + "deepspeed_config: {zero_stage: 3}\n",
        {"use_fsdp": False, "multi_gpu": True},
        "`deepspeed_config` is not read, as distributed_type is MULTI_GPU",
        "does not ask for it",
    ),
    "fp8": ("mixed_precision: fp8\n", {"mixed_precision": "fp8"}),
    "fp8 of torchao": (
        "mixed_precision: fp8\nfp8_config: {backend: AO, enable_fsdp_float8_all_gather: true, pad_inner_dim: false}\n",
        {"mixed_precision": "fp8"},
    ),
    "numbers left to the command line": ("distributed_type: MULTI_CPU\nnum_processes: -1\n", {"num_processes": 3}),
}


def read(text: str, home) -> Resolved:
    (home / "farflung.yaml").write_text(text)
    return resolve({"num_processes": "3"} if "-1" in text else {})


@pytest.mark.parametrize("name", FILES)
def test_what_accelerate_reads_is_read(name, home):
    text, settings, *notes = FILES[name]
    read_as = read(text, home)
    assert {key: read_as.settings.value(key) for key in settings} == settings
    assert len(read_as.notes) == len(notes)
    for note, words in zip(read_as.notes, notes, strict=True):
        assert words in note
        assert "farflung.yaml:" in note
    with environ.patched(rank_variables(read_as.settings)):  # what the ranks make of it
        assert environ.flag("ACCELERATE_USE_FSDP") == bool(read_as.settings.use_fsdp)
        FullyShardedDataParallelPlugin()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n", Unsupported, "yaml:2: .* DeepSpeed"),
        ("distributed_type: MULTI_NPU\nnum_processes: 2\n", Unsupported, "yaml:1: distributed_type is MULTI_NPU"),
        ("distributed_type: XLA\ntpu_name: pod\n", Unsupported, "asks for TPUs"),
        ("downcast_bf16: 'yes'\n", Unsupported, "TPUs"),
        ("distributed_type: MULTI_CPU\nmpirun_config: {mpirun_hostfile: hosts}\n", Unsupported, "sets"),
        ("mixed_precision: fp8\nfp8_config: {backend: TE}\n", Unsupported, "yaml:2: `fp8_config` .*TransformerEngine"),
        ("compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: x\n", Unsupported, "yaml:1: .*SageMaker"),
        ("distributed_type: MULTI_GPU\ntp_config:\n  tp_size: 2\n", Unsupported, "tensor parallelism"),
        ("invalid_key: x\nanother: y\n", ConfigError, "yaml:1: unknown key `in.*\n.*yaml:2: unknown key `another`"),
        ("use_cpu: false\ndebug: true\nuse_cpu: true\n", ConfigError, "yaml:3: `use_cpu` appears twice with different"),
        ("num_processes: -1\nuse_cpu: true\nlog_dir: x\n", ConfigError, "yaml:1: num_processes is -1; it must be"),
        (
            FSDP_1.replace("SHARDED_", "LOCAL_").replace("FULL_SHARD", "NO_SHARD"),
            Unsupported,
            "yaml:9: fsdp_sharding_strategy is 'NO_SHARD'.*\n.*yaml:10: fsdp_state_dict_type is 'LOCAL_STATE_DICT'",
        ),
        (
            FSDP_2.replace("SIZE_BASED_WRAP", "BY_SIZE").replace("true", "perhaps"),
            ConfigError,
            "yaml:7: fsdp_reshard_after_forward is 'PERHAPS'.*\n.*yaml:5: fsdp_auto_wrap_policy is 'by_size'",
        ),
    ],
)
def test_what_can_not_be_done_is_refused_with_its_lines_all_at_once(text, error, message, home):
    (home / "farflung.yaml").write_text(text)
    with pytest.raises(error, match=message):
        resolve({})
