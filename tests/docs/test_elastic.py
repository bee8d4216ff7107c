# SPDX-License-Identifier: Apache-2.0
"""What `docs/elastic.md` says was measured, and its picture of a run in which replicas were killed and joined."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def figures(name):
    lines = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_page_has_the_waits_and_losses_that_were_measured():
    page = " ".join((ROOT / "docs" / "elastic.md").read_text(encoding="utf-8").split())
    for run in [one for one in figures("recovery.jsonl") if "torchft" in one["figures"]]:
        peer, own = (run["figures"][name] for name in ("torchft", "farflung"))
        size = {2: "two", 3: "three"}[run["replicas"]]
        said = rf"one of {size} is killed: [^|]+ \(torchft: {peer['median_s']} s, {peer['worst_s']} s\)"
        assert re.search(rf"{said} \| {own['median_s']} s \| {own['worst_s']} s \|", page)
    meets = (ROOT / "docs" / "meet.md").read_text(encoding="utf-8")
    at_addresses = [run for run in figures("recovery.jsonl") if run.get("events") and "torchft" not in run["figures"]]
    waits = {name: found["median_s"] for name, found in at_addresses[-1]["figures"].items()}
    over = waits["farflung"], waits["farflung in a folder"], waits["farflung in a bucket"]
    assert "| {} s, as its connections close | {} s | {} s |".format(*over) in meets
    soak = figures("elastic_soak.jsonl")[-1]
    assert (soak["events"], soak["figures"]["steps_lost_or_counted_twice"]) == (200, 0)
    for median, worst in soak["figures"]["waited_s"].values():
        assert f"| {median} s | {worst} s |" in page
    early, last = soak["figures"]["held_at_event_20_and_last"]
    assert last["rss_mb"] < 1.02 * early["rss_mb"]
    assert all(last[name] <= early[name] for name in ("descriptors", "threads", "keys"))
    storms = {run["storm"]: run["figures"] for run in figures("elastic_storms.jsonl")}
    assert not any(one["fresh_weights"] or one.get("steps_lost_or_counted_twice") for one in storms.values())
    assert not storms["recipes"]["unlike_at_the_end"]
    kills = storms["alternate"]["events"], storms["admission"]["events"], 12 * storms["recipes"]["kills_each"]
    said = "{:,} kills of two replicas in turn, {} kills and stops of newcomers on their way in, {} kills under twelve"
    assert said.format(*kills) in page
    assert f"and {storms['launcher']['events']} of a launcher that had joined" in page
    cost = {(run["ranks"], run["numel"]): run["figures"]["of_fixed"] for run in figures("elastic_cost.jsonl")}
    assert set(cost) == {(ranks, numel) for ranks in (2, 4) for numel in (100_000, 10_000_000)}
    assert f"{min(cost.values()):.2f} to {max(cost.values()):.2f} times as long" in page
    for run in figures("newcomer.jsonl"):
        stop, usual = (run["figures"][name] for name in ("longest stop until it takes part, s", "a round of three, s"))
        assert f"{run['figures']['numel'] // 10**6}M parameters" in page
        assert (
            f"longest stop of the others until it took part was {stop} s, a round of three then took {usual} s" in page
        )
    shorter, longer = figures("elastic_loss.jsonl")
    assert (shorter["steps"], longer["steps"], f"{longer['work']:,} steps") == (1200, 3600, "14,400 steps")
    assert "14,400 steps of any replica" in page
    lost, three = (longer["figures"]["next_to_4"][name] for name in ("4, one dies twice", "3"))
    assert f"ended {-lost:.1%} below".replace("%", " %") in page
    assert f"three undisturbed ones {three:.1%} above".replace("%", " %") in page
    assert f"it was {-shorter['figures']['next_to_4']['4, one dies twice']:.1%} below".replace("%", " %") in page


def test_the_picture_shows_the_run_that_was_kept(tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "images" / "elastic.py"))
    run = json.loads(script["RUN"].read_text(encoding="utf-8").splitlines()[-1])["figures"]
    assert [event["signal"] for event in run["events"] if "signal" in event] == ["SIGKILL", "SIGSTOP", "SIGCONT"]
    stays = script["stays"](run)
    assert {name: len(parts) for name, parts in stays.items()} == {
        "replica 0": 1,
        "replica 1": 2,
        "replica 2": 2,
        "replica 0 of another launcher": 1,
    }
    script["draw"](tmp_path / "elastic.png")
    assert (tmp_path / "elastic.png").read_bytes()[:4] == b"\x89PNG"
