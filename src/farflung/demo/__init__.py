# SPDX-License-Identifier: Apache-2.0
"""The main job on real text: six ways to train one small GPT."""
