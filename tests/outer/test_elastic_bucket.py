# SPDX-License-Identifier: Apache-2.0
"""Replicas that meet in a bucket train on while its server fails, and nothing grows there in many rounds."""

import time

import psutil
import pytest

from farflung.comm.address import transport_at
from tests.outer.elastic_run import EVERY, ElasticRun, wrong


@pytest.mark.parametrize(
    "faults",
    [{"error_s": 2.0}, {"loses": 10}, pytest.param({"late_s": 0.3}, marks=pytest.mark.long)],
    ids=["503", "loses", "late"],
)
def test_no_replica_is_lost_while_the_server_fails(bucket, s3, faults):
    with ElasticRun(address=bucket, expected=2, grace_s=30.0) as run:
        members = [run.start(name) for name in range(2)]
        run.until(lambda: run.joined(*members) and run.at(3 * EVERY))
        s3.set(**faults)
        time.sleep(faults.get("error_s", 0))
        reached = max(one.get("position", 0) for one in list(run.said))
        run.until(lambda: run.at(reached + 3 * EVERY), 60.0)
        s3.set()
        said = run.finish()
    assert not wrong(said)
    assert not any(one.get("lost") for one in said)
    assert {one["member"] for one in said if "end" in one} == set(members)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_nothing_grows_in_three_hundred_rounds(kind, tmp_path, request):
    address = tmp_path.as_uri() if kind == "folder" else request.getfixturevalue("bucket")
    objects = transport_at(address).board
    counts, figures = [], []

    def look(process):
        counts.append(len(objects.list("")))
        with process.oneshot():
            figures.append((process.num_fds(), process.num_threads(), process.memory_info().rss / 1e6))

    with ElasticRun(address=address, expected=2, grace_s=30.0, step_s=0.0) as run:
        members = [run.start(name) for name in range(2)]
        process = psutil.Process(run.processes[members[0]].pid)
        for rounds in range(50, 301, 50):
            run.until(lambda rounds=rounds: run.at(rounds * EVERY), 120.0)
            for _ in range(5):
                look(process)
        assert not wrong(run.finish())
    assert max(counts) <= 110
    assert max(counts[5:10]) + 20 >= max(counts[-5:])
    before, after = (tuple(map(max, zip(*rows, strict=True))) for rows in (figures[5:10], figures[-5:]))
    assert after[0] <= before[0] + 8  # connections that are kept
    assert after[1] <= before[1] + 8
    assert after[2] <= before[2] * 1.1 + 10
    print(f"objects {max(counts)}, files, threads and MB {before} -> {after}")
