# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the logger that knows its rank."""

from farflung.process.log import MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
