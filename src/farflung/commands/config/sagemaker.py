# SPDX-License-Identifier: Apache-2.0
"""Door: SageMaker, which is not there."""

from farflung.compat.absent import __getattr__ as __getattr__
