# SPDX-License-Identifier: Apache-2.0
"""Who trains when, as replicas come and go? Runs `examples/elastic.py`, kills, adds and stops replicas, and keeps when
each of them was in which round; `docs/images/elastic.py` draws it. It takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _measure import report

from farflung.address.c10d_transport import C10dTransport
from farflung.address.member_store import LauncherNotes

SCRIPT = Path(__file__).parents[1] / "examples" / "elastic.py"
_APART_S, _STOPPED_S, _GRACE_S = 6.0, 7.0, 3
_KEPT = ("number", "step", "member", "members")


class Run:
    """A run, and what happens in it."""

    def __init__(self, log: Path, steps: int) -> None:
        log.touch()
        self.began = time.time()
        self.events: list[dict[str, Any]] = []
        self._log, self._steps = log, steps
        self._readers: list[threading.Thread] = []

    def launch(self, *flags: str) -> None:
        """Start a launcher."""
        script = [str(SCRIPT), "--steps", str(self._steps), "--log", str(self._log)]
        command = [sys.executable, "-m", "farflung", "launch", "--cpu", *flags, *script]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._readers.append(threading.Thread(target=self._read, args=(process,)))
        self._readers[-1].start()

    def send(self, number: signal.Signals, name: str, process: int) -> None:
        """Send a signal to a replica."""
        self._note(signal=number.name, to=name)
        os.kill(process, number)

    def printed(self, words: str) -> str:
        """Wait until a launcher has printed a line with these words, and return it."""
        while True:
            for line in [one.get("printed", "") for one in self.events]:
                if words in line:
                    return str(line)
            time.sleep(0.05)

    def rounds(self) -> list[dict[str, Any]]:
        """Return what replicas have written of rounds so far."""
        return [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines()]

    def finish(self) -> None:
        """Wait for all launchers."""
        for reader in self._readers:
            reader.join()

    def _note(self, **what: str) -> None:
        self.events.append({"at": round(time.time() - self.began, 2), **what})
        print(self.events[-1], file=sys.stderr, flush=True)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._note(printed=re.sub(r" of \S+:\d+ joined", " of another launcher joined", line.rstrip()))


def run_all(folder: Path, steps: int) -> dict[str, Any]:
    """Let one of three replicas be killed, a fourth one join, and one be stopped; return what happened, in seconds."""
    run = Run(folder / "rounds.jsonl", steps)
    run.launch("--elastic", "1:4", "--replicas", "3", "--grace_s", str(_GRACE_S))
    where = run.printed("farflung launch --join").split("--join ")[1].strip("`")
    host, port = where.split(":")
    notes = LauncherNotes(C10dTransport((host, int(port))).board)
    run.printed("training begins with 3 replicas")
    time.sleep(_APART_S)
    processes = {notes.name_of(one["member"]): one["process"] for one in run.rounds()}
    run.send(signal.SIGKILL, "replica 1", processes["replica 1"])
    run.printed("replica 1 joined")
    time.sleep(_APART_S)
    run.launch("--join", where)
    run.printed("another launcher joined")
    time.sleep(_APART_S)
    run.send(signal.SIGSTOP, "replica 2", processes["replica 2"])
    time.sleep(_STOPPED_S)
    run.send(signal.SIGCONT, "replica 2", processes["replica 2"])
    run.printed("replica 2 joined")
    rounds = run.rounds()
    names = {one: notes.name_of(one) for round_ in rounds for one in round_["members"]}
    run.finish()
    kept = [{"at": round(one["at"] - run.began, 2), **{name: one[name] for name in _KEPT}} for one in run.rounds()]
    names = {one: re.sub(r" of .*", " of another launcher", name) for one, name in names.items()}
    return {"names": names, "events": run.events, "rounds": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = run_all(Path(folder), chosen.steps)
    report("who trains when?", figures, seed=0, write_to="elastic_timeline.jsonl" if chosen.write else None)


if __name__ == "__main__":
    main()
