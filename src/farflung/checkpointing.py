# SPDX-License-Identifier: Apache-2.0
"""Door: where programs look for the parts of a checkpoint, which `Accelerator.save_state` writes."""

from farflung.compat.absent import __getattr__ as __getattr__
