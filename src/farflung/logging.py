# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the logger that knows its rank."""

from farflung.process.log import MultiProcessAdapter as MultiProcessAdapter, get_logger as get_logger
