# SPDX-License-Identifier: Apache-2.0
"""Door: random states."""

from farflung.process.seed import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
