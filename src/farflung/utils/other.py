# SPDX-License-Identifier: Apache-2.0
"""Door: models taken out of their wrappers, compiling by regions, files, names and sizes."""

from farflung.accelerator.operations import (
    extract_model_from_parallel as extract_model_from_parallel,
    wait_for_everyone as wait_for_everyone,
)
from farflung.checkpoint.reader import load as load
from farflung.comm.shards import model_has_dtensor as model_has_dtensor
from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.free_functions import *
from farflung.compat.probes import check_os_kernel as check_os_kernel
from farflung.launch.ask import write_basic_config as write_basic_config
from farflung.launch.network import get_free_port as get_free_port, is_port_in_use as is_port_in_use
from farflung.strategy.compile import (
    compile_regions as compile_regions,
    has_compiled_regions as has_compiled_regions,
    has_repeated_blocks as has_repeated_blocks,
    is_compiled_module as is_compiled_module,
    is_repeated_blocks as is_repeated_blocks,
)
