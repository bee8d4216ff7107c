# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for the prepared scheduler's class."""

from farflung.loop.scheduler import AcceleratedScheduler as AcceleratedScheduler
