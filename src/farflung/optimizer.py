# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the prepared optimizer's class."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.loop.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
