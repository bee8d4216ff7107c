# SPDX-License-Identifier: Apache-2.0
"""Door: models taken out of their wrappers, compiling by regions, files, names and sizes."""

from farflung.accelerator.helpers import save
from farflung.accelerator.operations import extract_model_from_parallel, wait_for_everyone
from farflung.base.absent import compile_regions_deepspeed, compile_regions_fsdp2
from farflung.base.modules import get_model_tp_size, get_module_children_bottom_up
from farflung.base.plain import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr
from farflung.checkpoint.clean import clean_state_dict_for_safetensors
from farflung.checkpoint.reader import load
from farflung.comm.shards import model_has_dtensor
from farflung.launch.ask import write_basic_config
from farflung.launch.network import get_free_port, is_port_in_use
from farflung.strategy.compile import (
    compile_regions,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)
from farflung.tools.hardware import check_os_kernel

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_port_in_use",
    "is_repeated_blocks",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]
