# SPDX-License-Identifier: Apache-2.0
"""Door: a small task for tests."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.testing import RegressionDataset as RegressionDataset, RegressionModel as RegressionModel
