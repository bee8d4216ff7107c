# SPDX-License-Identifier: Apache-2.0
"""Door: TransformerEngine, which is not there."""

from farflung.base.absent import (
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)

__all__ = ["apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers"]
