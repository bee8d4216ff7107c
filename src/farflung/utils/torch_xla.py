# SPDX-License-Identifier: Apache-2.0
"""Door: XLA, which is not there."""

from farflung.compat.absent import install_xla as install_xla
