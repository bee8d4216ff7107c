# SPDX-License-Identifier: Apache-2.0
"""Train the PyTorch loop you already have on any number of machines, and let it talk little."""

__version__ = "0.1.0"
