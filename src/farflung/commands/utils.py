# SPDX-License-Identifier: Apache-2.0
"""Door: parsers of commands."""

from farflung.compat.absent import __getattr__ as __getattr__
