# SPDX-License-Identifier: Apache-2.0
"""Door: where programs look for configuration files."""

from farflung.commands.config.config_args import *
from farflung.compat.absent import __getattr__ as __getattr__
