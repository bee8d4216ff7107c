# SPDX-License-Identifier: Apache-2.0
"""The words for what ranks brought to one collective when it does not agree; the same text on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farflung.base.errors import CollectiveMismatch
from farflung.base.words import numbered
from farflung.comm.packet import Header, LeafSpec, Signature


def called(signature: Signature) -> str:
    """Return a call as text: `broadcast(from_process=0)`."""
    name, *arguments = signature
    inside = ", ".join(f"{key}={value!r}" for key, value in arguments)
    return f"{name}({inside})" if inside else str(name)


def calls_differ(signatures: Sequence[Signature]) -> CollectiveMismatch:
    """Return the error for ranks that made different calls: who made which."""
    made = _by_rank("called", dict(enumerate(called(signature) for signature in signatures)))
    return CollectiveMismatch(f"{made}. All ranks must make the same calls in the same order.")


def waits_differ(doing: Mapping[int, str]) -> str:
    """Return the text of the error for ranks that wait for each other in different calls: who is where."""
    where = _by_rank("", {rank: f"in {call}" for rank, call in doing.items()})
    return f"Ranks wait for each other, {where}. All ranks must make the same calls in the same order."


def require_alike(headers: Sequence[Header], advice: str, alike: Callable[[LeafSpec], Any] = lambda kind: kind) -> None:
    """Raise CollectiveMismatch, with the first difference, if the ranks' trees differ in structure or in a leaf.

    Args:
        advice: what to do about shapes that differ.
        alike: what must be equal of each leaf.
    """
    if all(header is headers[0] for header in headers):
        return
    name = called(headers[0].signature)
    if any(header.tree != headers[0].tree for header in headers):
        trees = _by_rank("brought", dict(enumerate(_sketch(header.tree) for header in headers)))
        raise CollectiveMismatch(
            f"{name}: {trees}. All ranks must pass the same structure, with keys in the same order."
        )
    for k, path in enumerate(_paths(headers[0].tree)):
        kinds = [header.kinds[k] for header in headers]
        if any(alike(kind) != alike(kinds[0]) for kind in kinds):
            where = f"at {path}, " if path else ""
            one_device = all(kind.device == kinds[0].device for kind in kinds)
            one_dtype = all(kind.dtype == kinds[0].dtype for kind in kinds)
            leaves = _by_rank("brought", dict(enumerate(_leaf(kind, not one_device) for kind in kinds)))
            if not one_device:
                advice = "Move them to the same type of device on all ranks."
            elif not one_dtype:
                advice = "Convert them to the same dtype on all ranks."
            raise CollectiveMismatch(f"{name}: {where}{leaves}. {advice}")


def _by_rank(verb: str, texts: Mapping[int, str]) -> str:
    """`rank 0 brought A, ranks 1 and 3 B`: ranks of one text stand together, in the order of their first."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    first, *others = [(numbered("rank", found), text) for text, found in ranks.items()]
    return ", ".join([" ".join(filter(None, (first[0], verb, first[1]))), *map(" ".join, others)])


def _leaf(kind: LeafSpec, with_device: bool) -> str:
    text = f"{list(kind.shape)} {str(kind.dtype).removeprefix('torch.')}"
    return f"{text} on {kind.device}" if with_device else text


def _sketch(tree: Any) -> str:
    """`dict('a': tensor, 'b': list(tensor, tensor))`."""
    if tree is None:
        return "tensor"
    kind, keys, children = tree
    inside = [_sketch(child) for child in children]
    if keys is not None:
        inside = [f"{key}: {text}" for key, text in zip(keys, inside, strict=True)]
    return f"{kind}({', '.join(inside)})"


def _paths(tree: Any, path: str = "") -> Iterator[str]:
    """Yield where each leaf is, as one would write it: `['logits'][0]`."""
    if tree is None:
        yield path
        return
    _, keys, children = tree
    for key, child in zip(range(len(children)) if keys is None else keys, children, strict=True):
        yield from _paths(child, f"{path}[{key}]")
