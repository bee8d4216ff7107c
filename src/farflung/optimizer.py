# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the prepared optimizer's class."""

from farflung.compat.absent import move_to_device as move_to_device, patch_optimizer_step as patch_optimizer_step
from farflung.loop.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
