# SPDX-License-Identifier: Apache-2.0
"""How gradients travel: one process, or DDP."""
