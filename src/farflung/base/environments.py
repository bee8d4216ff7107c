# SPDX-License-Identifier: Apache-2.0
"""Words of Accelerate's that no setting of Farflung's takes: where a run is started, and kinds of quantized numbers."""

from __future__ import annotations

from enum import Enum


class ComputeEnvironment(str, Enum):
    """Where a run is started."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(str, Enum):
    """How SageMaker distributes a run."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class CustomDtype(Enum):
    """A kind of numbers that has no torch dtype."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
