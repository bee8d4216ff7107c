# SPDX-License-Identifier: Apache-2.0
"""Names of Accelerate's for what Farflung does not do: they can be imported, and using one says what to do instead.

`isinstance(x, DeepSpeedPlugin)` is False, a class may be derived from, and everything else raises `Unsupported`. Each
name is a word in one of the lists below. Doors that import `__getattr__` from here have all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from farflung.base.errors import Unsupported


@dataclass(frozen=True)
class Absent:
    """Something that Farflung does not do, with the names that belong to it."""

    what: str  # as the README lists it, if it does something for a run
    instead: str  # what to use
    names: str = ""  # of classes and functions
    parsers: str = ""  # functions that return parsers of its commands

    def error(self, name: str) -> Unsupported:
        return Unsupported(f"{name} belongs to {self.what}, which Farflung does not support. {self.instead}")


ABSENT: tuple[Absent, ...] = (
    Absent(
        "DeepSpeed",
        "Leave it out to train with DDP, or use an outer loop over it.",
        names="DeepSpeedPlugin DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim "
        "DummyScheduler HfDeepSpeedConfig DeepSpeedSequenceParallelConfig compile_regions_deepspeed "
        "deepspeed_launcher get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed prepare_deepspeed_cmd_env",
    ),
    Absent(
        "Megatron-LM",
        "Leave it out to train with DDP, or use an outer loop over it.",
        names="AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep "
        "add_model_config_to_megatron_parser avg_losses_across_data_parallel_group finish_mpu_init "
        "gather_across_data_parallel_groups megatron_lm_initialize megatron_lm_prepare_data_loader "
        "megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler "
        "model_provider_func parse_bert_config parse_glm4_moe_config parse_gpt2_config parse_llama_config "
        "parse_t5_config",
    ),
    Absent(
        "TransformerEngine",
        "Use mixed_precision='bf16'.",
        names="FP8RecipeKwargs TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast convert_model "
        "has_transformer_engine_layers",
    ),
    Absent("MS-AMP", "Use mixed_precision='bf16'.", names="MSAMPRecipeKwargs"),
    Absent(
        "TPU/XLA",
        "Use torch_xla's own launcher and loop.",
        names="install_xla prepare_tpu tpu_command_launcher tpu_launcher tpu_pod_launcher",
        parsers="tpu_command_parser",
    ),
    Absent(
        "SageMaker",
        "Start `farflung launch` inside the job.",
        names="SageMakerConfig _convert_nargs_to_dict get_sagemaker_input prepare_sagemager_args_inputs "
        "sagemaker_launcher",
    ),
    Absent(
        "bitsandbytes quantization",
        "Quantize with transformers or peft before `prepare`.",
        names="BnbQuantizationConfig get_keys_to_not_convert get_parameter_device get_quantized_model_device_map "
        "has_4bit_bnb_layers load_and_quantize_model quantize_and_offload_8bit replace_with_bnb_layers",
    ),
    Absent(
        "pipeline parallelism (PiPPy)",
        "Use torch.distributed.pipelining, or dispatch_model for inference.",
        names="build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy",
    ),
    Absent(
        "Accelerate's steps of sharding a model",
        "Use `Accelerator.prepare`, which shards models and gives optimizers their shards.",
        names="compile_regions_fsdp2 ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names "
        "fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler",
    ),
    Absent(
        "Accelerate's plugin for tensor parallelism",
        "Use `ParallelismConfig(tp_size=)`.",
        names="TorchTensorParallelPlugin",
    ),
    Absent(
        "Accelerate's commands as functions",
        "Use the command `farflung`; `farflung --help` lists what it does.",
        names="CustomArgumentGroup CustomArgumentParser CustomHelpFormatter SubcommandHelpFormatter ConversionStatus "
        "check_has_model clean_option config_command create_ascii_table default_config_command env_command "
        "get_cluster_input get_user_input merge_command setup_fp8_env test_launch update_config "
        "update_config_command",
        parsers="config_command_parser default_command_parser env_command_parser get_config_parser "
        "merge_command_parser update_command_parser",
    ),
    Absent(
        "Accelerate's adapters for trackers that are not built in",
        "Install a package that adds one by an entry point in the group `farflung.trackers`, or pass one of your own.",
        names="AimTracker ClearMLTracker CometMLTracker DVCLiveTracker SwanLabTracker",
    ),
    Absent(
        "binding processes to cores near their GPU",
        "Start them with numactl or taskset.",
        names="override_numa_affinity set_numa_affinity",
    ),
    Absent(
        "the inside of Accelerate",
        "Use `Accelerator`, whose methods do what it is for.",
        names="ThreadLocalSharedDict chained_operation do_nothing fallback_allocate gather_tensor_shape get_sampler "
        "is_torch_xpu_tensor load_accelerator_state load_custom_state mocked_dataloaders "
        "mocked_dataloaders_for_autoregressive_models move_to_device patch_optimizer_step save_accelerator_state "
        "save_custom_state torchao_required verify_operation",
    ),
)


class _AbsentClass(type):
    """The class of absent classes and functions: calling one raises, deriving from one does not."""

    absent: Absent

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise cls.absent.error(cls.__name__)


def _name(absent: Absent, name: str) -> Callable[..., NoReturn]:
    return _AbsentClass(name, (), {"absent": absent, "__module__": __name__, "__doc__": str(absent.error(name))})


class _AbsentParser(argparse.ArgumentParser):
    """The parser of an absent command: programs make it when they are imported, and may never use it."""

    refuse: Callable[..., NoReturn]

    def parse_known_args(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse()


def _parser(absent: Absent, name: str) -> Callable[..., argparse.ArgumentParser]:
    def make(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        parser = _AbsentParser(description=str(absent.error(name)))
        parser.refuse = _name(absent, name)
        return parser

    make.__name__ = make.__qualname__ = name
    return make


_MADE: dict[str, Any] = {
    name: make(absent, name)
    for absent in ABSENT
    for make, names in ((_name, absent.names), (_parser, absent.parsers))
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"this module of Farflung has no attribute {name!r}")  # it is that of several doors
    return _MADE[name]


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., NoReturn]:
    """Return a function that raises `Unsupported` when it is called: what needs DeepSpeed can't run."""
    return _name(ABSENT[0], getattr(func, "__name__", "deepspeed_required"))
