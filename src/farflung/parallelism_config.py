# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for `ParallelismConfig`."""

from farflung.config.parallelism import ParallelismConfig as ParallelismConfig
