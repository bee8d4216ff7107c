# SPDX-License-Identifier: Apache-2.0
"""Folders of runs that never were: three replicas, of which one was killed and started again, at fixed times."""

import json
import os

T0 = 1_790_000_000.0


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_lines(path, *rows):
    with path.open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def a_round(number, member, members, at, lost=None, joined=(), **more):
    size = len(members)
    row = {"model": 0, "member": member, "time": T0 + at, "number": number, "members": members}
    row |= {"step": 32 * (number + 1), "fragment": 0, "dropped": False, "weights": [1 / size] * size}
    row |= {"norms": [1.0] * size, "norm": 1.0, "cosine": 0.5, "bytes_sent": 1_000_000, "bytes_received": 1_000_000}
    row |= {"seconds_exposed": 0.5, "seconds_hidden": 0.0, "lost": lost or {}, "joined": joined, "seconds_voting": 0.1}
    row |= {"seconds_encoding": 0.05, "seconds_landing": 0.05, "seconds_recovering": 0.25 if lost else 0.0}
    return row | more


def sign(member, step, when, **more):
    who = {"member": member, "rank": 0, "host": "node1", "pid": 100 + member, "begun": T0 + 1}
    return {"time": T0 + when, **who, "step": step, "call": "", "at": "train.py:40", "since": T0 + when} | more


def write_run(path, signs, rounds=40, at=200.0):
    """Write a run that began 200 s ago; `signs` are the latest ones of replicas, each with when it was given."""
    path.mkdir(parents=True)
    facts = {"script": "train.py", "arguments": [], "started": T0, "command": [], "folder": "/home/me", "host": "node1"}
    facts |= {"pid": 99, "world": {"replicas": 3}, "settings": {}, "versions": {}, "system": "Linux", "git": "a1b2c3"}
    (path / "run.json").write_text(json.dumps(facts))
    names = {1: "replica 0", 2: "replica 1", 3: "replica 2", 4: "replica 2"}
    events = [{"time": T0, "event": "started", "replicas": 3}]
    events += [{"time": T0, "event": "process", "member": m, "name": name, "pid": 100 + m} for m, name in names.items()]
    said = [
        (10, "generation 1: training begins with 3 replicas"),
        (85, "generation 2: replica 2 is out: it was killed by SIGKILL; training continues with 2 replicas"),
        (130, "generation 3: replica 2 joined; 3 replicas train"),
    ]
    model = {"event": "model", "parameters": 1_000_000, "bytes": 4_000_000, "strategy": "NO", "ranks": 1, "island": 1}
    events += [{"time": T0 + 5, "member": m, "rank": 0, **model} for m in (1, 2, 3)]
    events += [{"time": T0 + when, "event": "note", "message": text} for when, text in said]
    write_lines(path / "events.jsonl", sorted(events, key=lambda one: one["time"]))
    lines = []
    for number in range(rounds):
        members = [1, 2, 3] if number < 15 else [1, 2] if number < 25 else [1, 2, 4]
        lost = {"3": "it was killed by SIGKILL"} if number == 15 else {}
        joined = [4] if number == 25 else []
        lines += [a_round(number, m, members, 10 + 4.5 * number, lost, joined) for m in members]
    write_lines(path / "rounds.jsonl", lines)
    metrics = [
        {"time": T0 + 10 + k, "member": 1, "rank": 0, "step": 8 * k, "values": {"loss": 3 / (1 + k / 20), "lr": 0.1}}
        for k in range(180)
    ]
    write_lines(path / "metrics.jsonl", metrics)
    write_lines(path / "steps.jsonl", [{"time": T0 + 9, "member": m, "rank": 0, "step": 7} for m in (1, 2, 3)])
    (path / "ranks").mkdir()
    for row in signs:
        file = path / "ranks" / f"replica{row['member']}.json"
        file.write_text(json.dumps(row).ljust(500) + "\n")
        os.utime(file, (row["time"], row["time"]))
    return T0 + at
