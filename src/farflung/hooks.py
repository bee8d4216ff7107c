# SPDX-License-Identifier: Apache-2.0
"""Door: hooks around a module's forward pass."""

from farflung.big_model.attach import (
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
from farflung.big_model.hooks import (
    AlignDevicesHook as AlignDevicesHook,
    CpuOffload as CpuOffload,
    LayerwiseCastingHook as LayerwiseCastingHook,
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    UserCpuOffloadHook as UserCpuOffloadHook,
    add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
