# SPDX-License-Identifier: Apache-2.0
"""The choice of a recipe from what a run has measured."""
