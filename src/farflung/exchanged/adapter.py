# SPDX-License-Identifier: Apache-2.0
"""What an adapter's files need in addition to its values, so that peft loads them: the settings, and peft's names."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn


def adapter_in(model: nn.Module) -> dict[str, Any] | None:
    """Return the settings of a peft model's active adapter as JSON, and how peft's file names each tensor, by name.

    None: the model has no adapter, or one whose saved values are computed, such as prompts.
    """
    peft: Any = sys.modules.get("peft")  # a model of peft has loaded it
    for prefix, module in model.named_modules() if peft is not None else ():
        if isinstance(module, peft.PeftModel) and not module.active_peft_config.is_prompt_learning:
            tensors = module.state_dict(keep_vars=True)
            found = peft.get_peft_model_state_dict(module, tensors, module.active_adapter, save_embedding_layers=False)
            names = {id(x): f"{prefix}.{name}".lstrip(".") for name, x in tensors.items()}
            if names.keys() >= {id(x) for x in found.values()}:
                settings = {**module.active_peft_config.to_dict(), "inference_mode": True}
                own = {names[id(x)]: name for name, x in found.items()}
                return {"settings": json.dumps(settings, default=list, indent=2), "names": own}
    return None
