# SPDX-License-Identifier: Apache-2.0
"""Door: Megatron-LM, which is not there."""

from farflung.compat.absent import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    MegatronEngine,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
    finish_mpu_init,
    gather_across_data_parallel_groups,
    megatron_lm_initialize as initialize,
    megatron_lm_prepare_data_loader as prepare_data_loader,
    megatron_lm_prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    megatron_lm_prepare_optimizer as prepare_optimizer,
    megatron_lm_prepare_scheduler as prepare_scheduler,
    model_provider_func,
)

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "finish_mpu_init",
    "gather_across_data_parallel_groups",
    "initialize",
    "model_provider_func",
    "prepare_data_loader",
    "prepare_model_optimizer_scheduler",
    "prepare_optimizer",
    "prepare_scheduler",
]
