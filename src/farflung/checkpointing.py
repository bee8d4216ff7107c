# SPDX-License-Identifier: Apache-2.0
"""Door: where programs look for the parts of a checkpoint, which `Accelerator.save_state` writes."""

from farflung.compat.absent import (
    load_accelerator_state as load_accelerator_state,
    load_custom_state as load_custom_state,
    save_accelerator_state as save_accelerator_state,
    save_custom_state as save_custom_state,
)
