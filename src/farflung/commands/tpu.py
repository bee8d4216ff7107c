# SPDX-License-Identifier: Apache-2.0
"""Door: TPUs, which are not there."""

from farflung.compat.absent import __getattr__ as __getattr__
