# SPDX-License-Identifier: Apache-2.0
"""Stands for the package `accelerate` where its folder is on Python's path: its names and modules are Farflung's."""

from farflung.integrations.as_accelerate import answer_imports, attribute, compatible_version, names

__version__ = compatible_version()

answer_imports()


def __getattr__(name: str) -> object:
    return attribute(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *names()})
