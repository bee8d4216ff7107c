# SPDX-License-Identifier: Apache-2.0
"""Door: rewriting files for FSDP 2, which is not there: `farflung launch` reads those of version 1 as they are."""

from farflung.compat.absent import __getattr__ as __getattr__
