# SPDX-License-Identifier: Apache-2.0
"""The words for what ranks did in one collective when it does not agree; the same text on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farflung.base.errors import CollectiveMismatch
from farflung.base.words import numbered


def called(signature: Sequence[Any]) -> str:
    """Return a call as text: `broadcast(from_process=0)`."""
    name, *arguments = signature
    inside = ", ".join(f"{key}={value!r}" for key, value in arguments)
    return f"{name}({inside})" if inside else str(name)


def calls_differ(signatures: Sequence[Sequence[Any]]) -> CollectiveMismatch:
    """Return the error for ranks that made different calls: who made which."""
    made = by_rank("called", dict(enumerate(called(signature) for signature in signatures)))
    return CollectiveMismatch(f"{made}. All ranks must make the same calls in the same order.")


def waits_differ(doing: Mapping[int, str]) -> str:
    """Return the text of the error for ranks that wait for each other in different calls: who is where."""
    where = by_rank("", {rank: f"in {call}" for rank, call in doing.items()})
    return f"Ranks wait for each other, {where}. All ranks must make the same calls in the same order."


def by_rank(verb: str, texts: Mapping[int, str]) -> str:
    """Return `rank 0 brought A, ranks 1 and 3 B`: ranks of one text stand together, in the order of their first."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    first, *others = [(numbered("rank", found), text) for text, found in ranks.items()]
    return ", ".join([" ".join(filter(None, (first[0], verb, first[1]))), *map(" ".join, others)])
