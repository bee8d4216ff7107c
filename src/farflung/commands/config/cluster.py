# SPDX-License-Identifier: Apache-2.0
"""Door: questions, which `farflung config` asks."""

from farflung.compat.absent import __getattr__ as __getattr__
