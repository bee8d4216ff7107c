# SPDX-License-Identifier: Apache-2.0
"""What can be seen of runs from outside, in their folders alone."""
