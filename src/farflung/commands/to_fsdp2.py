# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung to-fsdp2`, as functions."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.launch.to_fsdp2 import *
