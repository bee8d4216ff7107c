# SPDX-License-Identifier: Apache-2.0
"""Door: the progress bar that knows its rank."""

from farflung.accelerator.operations import tqdm as tqdm
