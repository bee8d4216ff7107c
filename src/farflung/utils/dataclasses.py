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
from farflung.big_model.device_map import CustomDtype as CustomDtype
from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.cluster import (
    ComputeEnvironment as ComputeEnvironment,
    SageMakerDistributedType as SageMakerDistributedType,
)
from farflung.compat.free_functions import (
    TensorInformation as TensorInformation,
    get_module_class_from_name as get_module_class_from_name,
)
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
