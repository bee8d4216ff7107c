# SPDX-License-Identifier: Apache-2.0
"""Everything a user may set, as dataclasses, and the one door to the environment."""
