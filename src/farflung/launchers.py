# SPDX-License-Identifier: Apache-2.0
"""Door: where notebooks look for the functions that start processes."""

from farflung.base.absent import test_launch
from farflung.launch.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]
