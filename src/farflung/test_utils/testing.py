# SPDX-License-Identifier: Apache-2.0
"""Door: helpers for tests."""

from farflung.compat.probes import is_hpu_available as is_hpu_available, is_xpu_available as is_xpu_available
from farflung.compat.testing import *
from farflung.compat.variables import parse_flag_from_env as parse_flag_from_env
