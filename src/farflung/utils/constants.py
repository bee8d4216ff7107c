# SPDX-License-Identifier: Apache-2.0
"""Door: names of files, words of settings, versions."""

from farflung.base.optional import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from farflung.compat.constants import *
