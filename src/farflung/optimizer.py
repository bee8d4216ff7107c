# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the prepared optimizer's class."""

from farflung.loop.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
