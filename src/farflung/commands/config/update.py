# SPDX-License-Identifier: Apache-2.0
"""Door: rewriting a configuration file, which Farflung does not do."""

from farflung.compat.absent import __getattr__ as __getattr__
