# SPDX-License-Identifier: Apache-2.0
"""Door: settings: handlers, plugins, and the words that they take."""

from farflung.base.enums import (
    BaseEnum as BaseEnum,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    EnumWithContains as EnumWithContains,
    FP8BackendType as FP8BackendType,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
from farflung.big_model.sizes import CustomDtype as CustomDtype
from farflung.compat.absent import (
    BnbQuantizationConfig as BnbQuantizationConfig,
    DeepSpeedPlugin as DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MegatronLMPlugin as MegatronLMPlugin,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    TERecipeKwargs as TERecipeKwargs,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    parse_bert_config as parse_bert_config,
    parse_glm4_moe_config as parse_glm4_moe_config,
    parse_gpt2_config as parse_gpt2_config,
    parse_llama_config as parse_llama_config,
    parse_t5_config as parse_t5_config,
)
from farflung.compat.cluster import (
    ComputeEnvironment as ComputeEnvironment,
    SageMakerDistributedType as SageMakerDistributedType,
)
from farflung.compat.nested_tensors import TensorInformation as TensorInformation
from farflung.compat.submodules import get_module_class_from_name as get_module_class_from_name
from farflung.config.compile import TorchDynamoPlugin as TorchDynamoPlugin
from farflung.config.handlers import (
    AORecipeKwargs as AORecipeKwargs,
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
    WatchdogKwargs as WatchdogKwargs,
)
from farflung.config.parallelism import (
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
)
from farflung.config.sharding import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
