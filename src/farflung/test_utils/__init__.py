# SPDX-License-Identifier: Apache-2.0
"""Door: where test programs look for helpers."""

from farflung.test_utils.testing import *
from farflung.test_utils.training import *
