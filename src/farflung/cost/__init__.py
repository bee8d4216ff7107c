# SPDX-License-Identifier: Apache-2.0
"""What a way of training together costs on a network: time, bytes and memory, as arithmetic that needs no torch."""
