# SPDX-License-Identifier: Apache-2.0
"""Door: parsers of commands."""

from farflung.base.absent import CustomArgumentGroup, CustomArgumentParser

__all__ = ["CustomArgumentGroup", "CustomArgumentParser"]
