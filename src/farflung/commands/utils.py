# SPDX-License-Identifier: Apache-2.0
"""Door: parsers of commands."""

from farflung.compat.absent import (
    CustomArgumentGroup as CustomArgumentGroup,
    CustomArgumentParser as CustomArgumentParser,
)
