# SPDX-License-Identifier: Apache-2.0
"""Door: a small task for tests."""

from farflung.compat.absent import (
    mocked_dataloaders as mocked_dataloaders,
    mocked_dataloaders_for_autoregressive_models as mocked_dataloaders_for_autoregressive_models,
)
from farflung.compat.testing import RegressionDataset as RegressionDataset, RegressionModel as RegressionModel
