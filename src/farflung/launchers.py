# SPDX-License-Identifier: Apache-2.0
"""Door: where notebooks look for the functions that start processes."""

from farflung.compat.absent import test_launch as test_launch
from farflung.launch.notebook import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
