# SPDX-License-Identifier: Apache-2.0
"""A run that tests save at addresses, of one weight, and the names of what lies there."""

import io
from contextlib import redirect_stderr

import torch

from farflung import Accelerator
from farflung.address.schemes import objects_at
from farflung.utils import ProjectConfiguration


class Weight:
    """A run of one weight, which is the number of its save."""

    def __init__(self, **project):
        settings = {"project_config": ProjectConfiguration(**project)} if project else {}
        self.accelerator = Accelerator(cpu=True, **settings)
        model = torch.nn.Linear(1, 1, bias=False)
        self.accelerator.prepare(model)
        self.weight = model.weight

    def save(self, number, at=None, **options):
        torch.nn.init.constant_(self.weight, number)
        return self.accelerator.save_state(at, **options)

    def load(self, at=None):
        with redirect_stderr(io.StringIO()) as said:
            self.accelerator.load_state(at)
        self.said = said.getvalue()
        return self.weight.item()


def names_at(place):
    return list(objects_at(place).names_below(""))
