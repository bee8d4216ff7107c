# SPDX-License-Identifier: Apache-2.0
"""Door: the names of all modules in this folder, and those of parallelism and of launched functions."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.config.parallelism import ParallelismConfig as ParallelismConfig
from farflung.utils.ao import *
from farflung.utils.bnb import *
from farflung.utils.constants import *
from farflung.utils.dataclasses import *
from farflung.utils.deepspeed import *
from farflung.utils.environment import *
from farflung.utils.fsdp_utils import *
from farflung.utils.imports import *
from farflung.utils.launch import *
from farflung.utils.launch import _filter_args as _filter_args
from farflung.utils.memory import *
from farflung.utils.modeling import *
from farflung.utils.offload import *
from farflung.utils.operations import *
from farflung.utils.other import *
from farflung.utils.random import *
from farflung.utils.torch_xla import *
from farflung.utils.tqdm import *
from farflung.utils.transformer_engine import *
from farflung.utils.versions import *
