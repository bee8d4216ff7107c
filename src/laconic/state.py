# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the state classes."""

from laconic.accelerator.views import AcceleratorState, GradientState, PartialState
from laconic.base.enums import DistributedType

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]
