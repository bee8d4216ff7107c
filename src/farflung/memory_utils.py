# SPDX-License-Identifier: Apache-2.0
"""Door: the former path of `utils.memory`."""

from farflung.tools.memory import (
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
)
