# SPDX-License-Identifier: Apache-2.0
"""What the server behind `run_ranks` loads once, so that each rank starts with it in memory."""

import torch.optim as optim
import torch.utils.data as data
from torch.compiler import list_backends
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel", "data", "optim"]

list_backends()  # loads what compiles, as DDP does when a model is wrapped: a second for each rank
