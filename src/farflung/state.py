# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the state classes."""

from farflung.accelerator.views import AcceleratorState, GradientState, PartialState, is_initialized
from farflung.base.absent import ThreadLocalSharedDict, do_nothing
from farflung.base.enums import DistributedType

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
]
