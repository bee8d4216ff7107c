# SPDX-License-Identifier: Apache-2.0
"""Door: where notebooks look for the functions that start processes."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.notebook import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
