# SPDX-License-Identifier: Apache-2.0
"""Door: SageMaker, which is not there."""

from farflung.compat.absent import get_sagemaker_input as get_sagemaker_input
