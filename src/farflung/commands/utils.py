# SPDX-License-Identifier: Apache-2.0
"""Door: parsers of commands."""

from farflung.base.absent import (
    CustomArgumentGroup as CustomArgumentGroup,
    CustomArgumentParser as CustomArgumentParser,
)
