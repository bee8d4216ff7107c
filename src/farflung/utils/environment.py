# SPDX-License-Identifier: Apache-2.0
"""Door: environment variables, and what this machine has."""

from farflung.base.probes import are_libraries_initialized, get_current_device_type
from farflung.config.variables import (
    CPUInformation,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from farflung.tools.hardware import (
    check_cuda_fp8_capability,
    check_cuda_p2p_ib_support,
    get_driver_version,
    get_gpu_info,
    override_numa_affinity,
    set_numa_affinity,
)

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]
