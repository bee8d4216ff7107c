# SPDX-License-Identifier: Apache-2.0
"""Door: DeepSpeed, which is not there."""

from farflung.compat.absent import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
    HfDeepSpeedConfig as HfDeepSpeedConfig,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
