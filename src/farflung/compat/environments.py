# SPDX-License-Identifier: Apache-2.0
"""Words of Accelerate's that no setting of Farflung's takes: where a run is started."""

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
