# SPDX-License-Identifier: Apache-2.0
"""Door: the progress bar that knows its rank."""

from farflung.compat.free_functions import tqdm as tqdm
