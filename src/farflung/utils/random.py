# SPDX-License-Identifier: Apache-2.0
"""Door: random states."""

from farflung.process.seed import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
