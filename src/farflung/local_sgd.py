# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for `LocalSGD`."""

from farflung.accelerator.local_sgd import LocalSGD as LocalSGD
