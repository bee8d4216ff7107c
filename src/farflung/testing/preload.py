# SPDX-License-Identifier: Apache-2.0
"""What the server behind `run_ranks` loads once, so that each rank starts with it in memory."""

import torch._dynamo as dynamo  # which DDP loads when a model is wrapped: a second for each rank
import torch.optim as optim
import torch.utils.data as data
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel", "data", "dynamo", "optim"]
