# SPDX-License-Identifier: Apache-2.0
"""What is exchanged of a model: fragments bound to memory, and their state between rounds."""
