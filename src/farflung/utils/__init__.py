# SPDX-License-Identifier: Apache-2.0
"""Door: the names of all modules in this folder, and those of parallelism and of launched functions."""

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
    gather_across_data_parallel_groups,
    megatron_lm_initialize,
    megatron_lm_prepare_data_loader,
    megatron_lm_prepare_model_optimizer_scheduler,
    megatron_lm_prepare_optimizer,
    megatron_lm_prepare_scheduler,
)
from farflung.config.parallelism import ParallelismConfig
from farflung.utils.ao import *
from farflung.utils.bnb import *
from farflung.utils.constants import *
from farflung.utils.dataclasses import *
from farflung.utils.deepspeed import *
from farflung.utils.environment import *
from farflung.utils.fsdp_utils import *
from farflung.utils.imports import *
from farflung.utils.launch import *
from farflung.utils.launch import _convert_nargs_to_dict, _filter_args
from farflung.utils.memory import *
from farflung.utils.modeling import *
from farflung.utils.offload import *
from farflung.utils.operations import *
from farflung.utils.other import *
from farflung.utils.random import *
from farflung.utils.torch_xla import *
from farflung.utils.tqdm import *
from farflung.utils.transformer_engine import *
from farflung.utils.versions import *
