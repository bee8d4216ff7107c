# SPDX-License-Identifier: Apache-2.0
"""Door: Megatron-LM, which is not there."""

from farflung.compat.absent import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    MegatronEngine as MegatronEngine,
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
    T5TrainStep as T5TrainStep,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    finish_mpu_init as finish_mpu_init,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    megatron_lm_initialize as initialize,
    megatron_lm_prepare_data_loader as prepare_data_loader,
    megatron_lm_prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
    megatron_lm_prepare_optimizer as prepare_optimizer,
    megatron_lm_prepare_scheduler as prepare_scheduler,
    model_provider_func as model_provider_func,
)
