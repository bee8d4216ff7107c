# SPDX-License-Identifier: Apache-2.0
"""Watches a script of the shelf, unseen by it: Python imports this file as it starts, since its folder is on the path.

At its end each process leaves a file with a digest of the weights that its optimizers trained, the losses whose
gradients it took, and how often it trained on each sample.
"""

import atexit
import hashlib
import json
import os
from collections import Counter
from pathlib import Path

_losses, _told, _samples, _optimizers = [], [], Counter(), []


def _digest(tensors):
    digest = hashlib.sha256()
    for one in tensors:
        digest.update(one.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:12]


def seen(*values):
    """Count the samples of a batch that the script is about to train on: tensors whose rows are samples."""
    _samples.update(_digest(rows) for rows in zip(*values, strict=True))


def told(value):
    """Note a value that counts in place of the losses."""
    _told.append(value)


def steps(trainer):
    """Count the samples of the batches of a Trainer of transformers."""
    step = trainer.training_step

    def watched(model, inputs, *args):
        seen(inputs["input_ids"])
        return step(model, inputs, *args)

    trainer.training_step = watched


def _install():
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    backward = torch.Tensor.backward

    def watched(loss, *args, **options):
        _losses.append(loss.item())
        return backward(loss, *args, **options)

    def stepped(optimizer, *_):
        if not any(one is optimizer for one in _optimizers):
            _optimizers.append(optimizer)

    torch.Tensor.backward = watched
    register_optimizer_step_post_hook(stepped)
    atexit.register(_leave)  # before any other, so it is called after all others


def _leave():
    weights = [one for optimizer in _optimizers for group in optimizer.param_groups for one in group["params"]]
    left = {"weights": _digest(weights), "losses": _told or _losses, "steps": len(_losses), "samples": _samples}
    if _losses:
        (Path(os.environ["SHELF_LEFT"]) / f"{os.getpid()}.json").write_text(json.dumps(left))


if "RANK" in os.environ and "SHELF_LEFT" in os.environ:  # not in launchers
    _install()
