# SPDX-License-Identifier: Apache-2.0
"""Door: FSDP: files of sharded models, and what Accelerate's `prepare` consists of, which is not there."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.free_functions import get_parameters_from_modules as get_parameters_from_modules
from farflung.compat.fsdp_files import (
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from farflung.config.sharding import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
