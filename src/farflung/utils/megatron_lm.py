# SPDX-License-Identifier: Apache-2.0
"""Door: Megatron-LM, which is not there."""

from farflung.compat.absent import (
    __getattr__ as __getattr__,
    megatron_lm_initialize as initialize,
    megatron_lm_prepare_data_loader as prepare_data_loader,
    megatron_lm_prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    megatron_lm_prepare_optimizer as prepare_optimizer,
    megatron_lm_prepare_scheduler as prepare_scheduler,
)
