# SPDX-License-Identifier: Apache-2.0
"""Door: the command `farflung config`."""

from farflung.compat.absent import __getattr__ as __getattr__
