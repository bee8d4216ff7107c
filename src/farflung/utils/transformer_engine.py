# SPDX-License-Identifier: Apache-2.0
"""Door: TransformerEngine, which is not there."""

from farflung.compat.absent import (
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
    has_transformer_engine_layers as has_transformer_engine_layers,
)
