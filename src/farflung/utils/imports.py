# SPDX-License-Identifier: Apache-2.0
"""Door: which libraries and devices are there."""

from farflung.compat.absent import __getattr__ as __getattr__, deepspeed_required as deepspeed_required
from farflung.compat.probes import *
from farflung.compat.variables import is_rich_available as is_rich_available
