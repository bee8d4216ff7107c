# SPDX-License-Identifier: Apache-2.0
"""Door: environment variables, and what this machine has."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.probes import *
from farflung.compat.variables import *
