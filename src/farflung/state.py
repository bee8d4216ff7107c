# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the state classes."""

from farflung.accelerator.views import (
    AcceleratorState as AcceleratorState,
    GradientState as GradientState,
    PartialState as PartialState,
    is_initialized as is_initialized,
)
from farflung.base.enums import DistributedType as DistributedType
from farflung.compat.absent import __getattr__ as __getattr__
