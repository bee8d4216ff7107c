# SPDX-License-Identifier: Apache-2.0
"""Vocabulary and pure helpers; knows no rank."""
