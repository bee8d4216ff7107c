# SPDX-License-Identifier: Apache-2.0
"""What all tests share: GPU tests are skipped without a GPU, and no launcher's variables leak in from outside."""

import pytest
import torch

from farflung.config import environ

LAUNCHER_WORDS = ("RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI_", "SLURM_", "ACCELERATE_", "FARFLUNG_", "FSDP_")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def clean_environment():
    """Run each test without the variables of a launcher, and put back afterwards what it changed."""
    before = environ.snapshot()
    environ.remove(*[name for name in before if name.removeprefix("LOCAL_").startswith(LAUNCHER_WORDS)])
    yield
    environ.remove(*(environ.snapshot().keys() - before.keys()))
    environ.export(before)
