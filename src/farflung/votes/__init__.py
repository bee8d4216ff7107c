# SPDX-License-Identifier: Apache-2.0
"""What members of a run tell each other about a step: ballots, and the generation in which they are cast."""
