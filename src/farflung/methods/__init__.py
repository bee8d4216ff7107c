# SPDX-License-Identifier: Apache-2.0
"""The methods as equations: recipes, and the parts that they are composed of."""
