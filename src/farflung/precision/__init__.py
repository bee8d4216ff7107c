# SPDX-License-Identifier: Apache-2.0
"""How numbers are kept: full, autocast, or fp16 with a scaler."""
