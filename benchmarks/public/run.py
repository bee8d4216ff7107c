# SPDX-License-Identifier: Apache-2.0
"""Which scripts that nobody here wrote train under Farflung: `python benchmarks/public/run.py [names] [--write]`.

It fetches each script of `shelf.yaml` at its commit, makes the changes there, and runs it as two processes in 4 ways;
the packages of `requirements.txt` are to be installed. One JSON line for each script: whether the processes ended with
equal weights, how often they trained on each sample, and the mean loss of the last quarter of their steps. `--table`
prints the table of what was kept.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from _measure import RESULTS, report  # noqa: E402
from stand_ins import STAND_INS  # noqa: E402

SHELF = yaml.safe_load((HERE / "shelf.yaml").read_text(encoding="utf-8"))
CHANGES = ("needed", "replicas", "watched")
LAUNCH = ["-m", "farflung", "launch", "--cpu", "--run_dir", "none", "--max_restarts", "0"]
OUTER = ["--outer", "diloco", "--outer-every", "4", "--outer-report", "off"]
WAYS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "fixed": [*LAUNCH, "--num_processes", "2"],
    "elastic": [*LAUNCH, "--elastic", "1:3", "--replicas", "2", *OUTER],
    "meet": [*LAUNCH, "--elastic", "2:3", "--replicas", "1", "--meet", "file://{left}/run", *OUTER],  # two launchers
}
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
LIMIT_S = 240


def fetched(script: dict[str, Any], folder: Path, mirrors: str) -> Path:
    """Fetch the script at its commit, and make its changes and what stands in for its downloads."""
    owner, name = script["repository"].split("/")
    place = mirrors.format(owner=owner, name=name) if mirrors else str(folder / ".git")
    lines = [["checkout", "--quiet", script["commit"], "--", script["folder"]]]
    if not mirrors:
        url = f"https://github.com/{owner}/{name}"
        fetch = ["fetch", "--quiet", "--depth", "1", "--filter=blob:none", "origin", script["commit"]]
        lines[:0] = [["init", "--quiet"], ["remote", "add", "origin", url], fetch]
    env = {**os.environ, "GIT_INDEX_FILE": str(folder / "index")}
    for line in lines:
        git = ["git", f"--git-dir={place}", f"--work-tree={folder}", *line]
        subprocess.run(git, check=True, capture_output=True, text=True, env=env, cwd=folder)
    for change in (one for kind in CHANGES for one in script.get(kind, ())):
        file = folder / change.get("path", f"{script['folder']}/{script['file']}")
        text = file.read_text(encoding="utf-8")
        if change["old"] not in text:
            raise SystemExit(f"{file} of {script['repository']} doesn't have {change['old']!r}, which is to be changed")
        file.write_text(text.replace(change["old"], change["new"]), encoding="utf-8")
    STAND_INS.get(script.get("stand_in"), lambda _: None)(folder / script["folder"])
    return folder / script["folder"]


def ran(script: dict[str, Any], way: str, cwd: Path) -> tuple[list[dict[str, Any]], str]:
    """Run a script in a way; return what its processes left, and what they and their launchers printed."""
    with tempfile.TemporaryDirectory() as left:
        env = {**os.environ, **QUIET, "SHELF_LEFT": left, "PYTHONPATH": f"{HERE / 'watch'}:{cwd}", "COLUMNS": "400"}
        line = [sys.executable, *(word.format(left=left) for word in WAYS[way])]
        if way == "torchrun":
            env["ACCELERATE_USE_CPU"] = "true"
        if way == "fixed":
            line += [] if "averages" in script else OUTER
            line += ["--as-accelerate"] * ("as_accelerate" in script)
        line += [script["file"], *script.get("arguments", "").split()]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launchers = [subprocess.Popen(line, cwd=cwd, env=env, **options) for _ in range(2 if way == "meet" else 1)]
        said = ""
        for one in launchers:
            try:
                said += one.communicate(timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired:
                one.terminate()
                said += one.communicate(timeout=60)[0] + f"\nError: it took longer than {LIMIT_S} s"
        said += "\nexit codes are not 0" * any(one.returncode for one in launchers)
        return [json.loads(file.read_text()) for file in sorted(Path(left).glob("*.json"))], said


def judged(ends: list[dict[str, Any]], said: str) -> dict[str, Any]:
    """Return whether weights are equal, how often samples came, and the loss of the last quarter of the steps."""
    if len(ends) != 2 or "exit codes are not 0" in said:
        error = re.findall(r"\w*(?:Error|Unsupported): (.{20,300})", said)
        verdict = "refused" if "by a wrong use" in said else "failed"
        return {"verdict": verdict, "why": (error or [said.strip()[-200:]])[0].strip(" │")}
    losses = [loss for end in ends for loss in end["losses"][-max(1, len(end["losses"]) // 4) :]]
    counts = sum((Counter(end["samples"]) for end in ends), Counter())
    return {
        "verdict": "equal" if len({end["weights"] for end in ends}) == 1 else "differ",
        "steps": [end["steps"] for end in ends],
        "samples": dict(sorted(Counter(counts.values()).items())),  # how many samples came how often
        "loss": statistics.fmean(losses),
    }


def table() -> str:
    """Return the latest results as a table of a page."""
    latest: dict[str, dict[str, Any]] = {}
    for line in (RESULTS / "public.jsonl").read_text(encoding="utf-8").splitlines():
        latest.setdefault(json.loads(line)["script"], {}).update(json.loads(line)["figures"])
    lines = [f"| script | changes | {' | '.join(f'`{way}`' for way in WAYS)} |", "|---" * (2 + len(WAYS)) + "|"]
    for name in (name for name in SHELF if name in latest):
        script, cells = SHELF[name], []
        for found in (latest[name].get(way, {"verdict": ""}) for way in WAYS):
            is_short = script["epochs"] and set(found.get("samples", {})) - {str(script["epochs"])}
            loss = f"{found.get('loss', 0):.3g}" + " (samples left)" * bool(is_short)
            cells.append(loss if found["verdict"] == "equal" else found["verdict"])
        changes = "+".join(str(len(script.get(kind, ()))) for kind in CHANGES[:2])
        lines.append(f"| {name} | {changes} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SHELF), help="scripts of the shelf [all]")
    parser.add_argument("--ways", default=",".join(WAYS), help="ways to run them [all]")
    parser.add_argument("--mirrors", default="", help="git folders, not GitHub, such as /mirrors/{owner}/{name}.git")
    parser.add_argument("--write", action="store_true", help="keep the results")
    parser.add_argument("--table", action="store_true", help="print the table of what was kept, and run nothing")
    parser.add_argument("--say", action="store_true", help="print what scripts and launchers print")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    for name in options.names:
        figures, script = {}, SHELF[name]
        for way in options.ways.split(","):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    cwd = fetched(script, Path(folder), options.mirrors)
                except subprocess.CalledProcessError as error:
                    print(f"{name}: skipped, as {script['repository']} can't be fetched: {error.stderr.strip()[-200:]}")
                    break
                ends, said = ran(script, way, cwd)
            print(said * options.say, end="")
            figures[way] = judged(ends, said)
        else:
            write_to = "public.jsonl" if options.write else None
            report("public", figures, seed=0, write_to=write_to, script=name, of=script["commit"][:7])


if __name__ == "__main__":
    main()
