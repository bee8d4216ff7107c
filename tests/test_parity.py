# SPDX-License-Identifier: Apache-2.0
"""The same script under Accelerate 1.15 and under Farflung: what it sees is the same, or a row of docs/migrating.md.

`tests/parity_program.py` is the script. All settings of the table run one after the other in one process, and in one
pair of processes, with each library. What both make of the same torch calls is compared bit by bit.
"""

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farflung.testing.ranks import run_ranks
from tests.parity_program import EPOCHS, Case, run

MIGRATING = Path(__file__).parent.parent / "docs" / "migrating.md"


def trainings() -> list[Case]:
    cases = [
        Case(f"windows of {steps} over {length}", accumulation=steps, length=length, max_norm=100.0)
        for steps, length in product((1, 2, 3), (24, 14, 9))
    ]
    for split, dispatch in product((False, True), (None, True)):
        batch_size = 4 if split else 2
        name = f"split={split} dispatch={dispatch}"
        cases.append(Case(f"{name} bf16", split=split, dispatch=dispatch, batch_size=batch_size, precision="bf16"))
        for (number, schedule), follows in product(enumerate(("inverse", "onecycle", "cosine")), (True, False)):
            cases.append(
                Case(
                    f"{name} {schedule} follows={follows}",
                    is_second=(split + bool(dispatch) + number + follows) % 2 == 1,  # each pair is in either half
                    split=split,
                    dispatch=dispatch,
                    batch_size=batch_size,
                    schedule=schedule,
                    schedule_follows=follows,
                    accumulation=2,
                )
            )
    for order, seedable, length in product(("shuffle", "generator"), (False, True), (16, 11)):
        cases.append(Case(f"{order} seedable={seedable} {length}", order=order, seedable=seedable, length=length))
    return [
        *cases,
        Case("windows that go on over the end", accumulation=3, length=16, sync_with_dataloader=False),
        Case("a stream", data="stream", length=13),
        Case("a stream, drop_last", data="stream", length=13, drop_last=True),
        Case("drop_last", length=13, drop_last=True, accumulation=3),
        Case("workers", order="shuffle", num_workers=1),
        Case("skipping", order="shuffle", skip=2),
        Case("uneven inputs", length=13, join=True, processes=(2,)),
        Case("local SGD", local_sgd=2, length=24),
        Case("the remainder", length=13, tells_remainder=True),
    ]


def readings() -> list[Case]:
    """Each way of sharing out data, with two lengths drawn for it: among two processes, and what is left in one."""
    draw = random.Random(0)
    settings = product((False, True), (None, False, True), (True, False), (False, True), ("map", "stream", "sized"))
    cases = []
    for values in settings:
        chosen = dict(zip(("split", "dispatch", "even", "drop_last", "data"), values, strict=True))
        batch_size = 4 if chosen["split"] else 2
        processes = (2,) if chosen["split"] or not chosen["even"] else (1, 2)
        for number, length in enumerate(draw.sample((16, 13, 11, 1), 2)):
            name = f"read {chosen} {length}"
            more = {"train": False, "is_second": bool(number), "length": length, "batch_size": batch_size}
            cases.append(Case(name, processes, **chosen, **more))
    return cases


def short_window(case: Case, processes: int, _: int) -> set[str]:
    size = case.per_round(processes)
    batches = case.length // size if case.drop_last else -(-case.length // size)
    short = case.train and case.sync_with_dataloader and batches % case.accumulation
    return {"norm", "loss", "mean_loss", "predictions", "weights"} if short else set()


def padding_stays(case: Case, processes: int, _: int) -> set[str]:
    sharded = processes > 1 and not case.is_map and not case.dispatches
    return {"gathered"} if sharded and case.even and not case.drop_last and case.left(processes) else set()


def padded_nevertheless(case: Case, processes: int, rank: int) -> set[str]:
    left = case.left(processes)
    if processes == 1 or case.even or case.drop_last or not left or (case.is_map and not case.dispatches):
        return set()
    part = case.per_round(processes) // processes
    fair = -(-left // processes) if case.dispatches else part
    own = min(max(left - rank * fair, 0), fair)
    if own == (fair if case.dispatches else part):
        return set()
    if own:
        return {"indices"}
    return {"indices", "end", "batches", *(["length"] if case.data == "sized" and not case.dispatches else [])}


def no_whole_round(case: Case, processes: int, _: int) -> set[str]:
    empty = case.dispatches and case.drop_last and case.length < case.per_round(processes)
    return {"error"} if empty else set()


def batch_size_of_all(case: Case, processes: int, _: int) -> set[str]:
    missing = case.dispatches or case.skip or (processes > 1 and not case.is_map)
    return {"total_batch_size"} if missing else set()


def not_joined(case: Case, _: int, rank: int) -> set[str]:
    if not case.join:
        return set()
    later = {"rate", "syncs", "end", "batches"} if rank == 1 else set()
    return {"indices", "loss", "norm", "weights", *later}


# The deliberate differences: the first column of the row in docs/migrating.md, and what of the report differs on a
# rank, given the case, the number of processes and the rank.
ROWS = {
    "have the data end inside an accumulation window": short_window,
    "`gather_for_metrics` over iterable data with `dispatch_batches=False`": padding_stays,
    "`even_batches=False` with iterable or dispatched data": padded_nevertheless,
    "dispatch fewer samples than one round needs, with `drop_last=True`": no_whole_round,
    "read a loader's `total_batch_size`": batch_size_of_all,
    "`join_uneven_inputs` on processes without GPUs": not_joined,
    "read `gradient_state.remainder`": lambda case, *_: {"remainder"} if case.tells_remainder else set(),
}
CASES = [*trainings(), *readings()]


def reports(library: str, processes: int, cases: list[Case]) -> list[dict[str, dict[str, Any]]]:
    """What each rank saw with a library, by the name of the case."""
    of_ranks = run_ranks(run, processes, library, cases, connect=False, timeout_s=100.0)
    return [{case.name: report for case, report in zip(cases, seen, strict=True)} for seen in of_ranks]


def same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if tolerance and isinstance(one, (float, np.ndarray)):
        return np.allclose(one, other, rtol=0, atol=tolerance)
    return np.array_equal(one, other)


def unexpected(case: Case, processes: int, rank: int, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """What differs in a report without a row of the page, or is the same in spite of one."""
    if "error" in ours:
        return {"error": ours["error"]}
    expected = set().union(*(fields(case, processes, rank) for fields in ROWS.values()))
    if "error" in expected:
        return {} if set(theirs) == {"error"} else {"no error": theirs}
    if theirs["length"] not in ("unknown", theirs["batches"] / EPOCHS):
        expected.add("length")
    tolerance = 1e-6 if case.local_sgd else 0.0  # both average the same weights, by other sums
    different = {name for name in theirs if not same(theirs[name], ours[name], tolerance)}
    found = {name: (theirs[name], ours[name]) for name in different ^ expected}
    if ours["length"] != "unknown" and case.even and not case.join and ours["length"] * EPOCHS != ours["batches"]:
        found["a length that is not that of the loader"] = ours["length"]
    return found


@pytest.mark.parametrize("is_second", [False, pytest.param(True, marks=pytest.mark.long)], ids=["first", "second"])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_sees_the_same_but_for_the_rows_of_the_page(processes, is_second):
    """In one test, as all cases share a run: workers of pytest that divided them would each repeat it."""
    cases = [case for case in CASES if processes in case.processes and case.is_second == is_second]
    theirs, ours = (reports(library, processes, cases) for library in ("accelerate", "farflung"))
    wrong = {
        f"{case.name}, rank {rank}": found
        for case in cases
        for rank in range(processes)
        if (found := unexpected(case, processes, rank, theirs[rank][case.name], ours[rank][case.name]))
    }
    assert not wrong


def test_every_deliberate_difference_is_a_row_of_the_page_and_is_there():
    page = MIGRATING.read_text(encoding="utf-8")
    first = [case for case in CASES if not case.is_second]
    for what, fields in ROWS.items():
        assert f"| {what} |" in page
        assert any(fields(case, n, n - 1) for case in first for n in case.processes), what
    assert "| `len` of a loader over iterable data, or with `even_batches=False` |" in page
