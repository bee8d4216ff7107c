# SPDX-License-Identifier: Apache-2.0
"""Draw `watch.svg`: what `farflung watch` showed of a run of `make demo-elastic`, whose folder is kept in `watch.json`.

Run it with `python docs/images/watch.py`; `--record` makes and keeps a new run first (a minute).
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from farflung.base.errors import ConfigError
from farflung.observe.run import ObservedRun
from farflung.observe.watch import screen

TARGET = Path(__file__).with_suffix(".svg")
KEPT = Path(__file__).with_suffix(".json")
FILES = ("events", "rounds", "steps")
MOMENTS = (("began", 3.0), ("lost", 1.0), ("joined", 2.0), ("joined", 20.0))  # seconds after an event, when we look
SEEN = ("model", "member", "time", "number", "members", "dropped", "bytes_sent", "seconds_exposed", "lost", "joined")
_WIDTH, _FRAME_S = 108, 3
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>farflung watch, while one of three replicas is killed and comes back</title>
<style>
text {{ font: 20px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.frame {{ opacity: 0; animation: turn {whole}s step-end infinite; }}
.frame:last-of-type {{ opacity: 1; }}
@keyframes turn {{ 0% {{ opacity: 1; }} {share:.3f}% {{ opacity: 0; }} 100% {{ opacity: 0; }} }}
@media (prefers-reduced-motion: reduce) {{ .frame {{ animation: none; }} }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#292929"/>
{frames}
</svg>
"""
_FRAME = """<g class="frame" style="animation-delay: {delay}s" transform="translate(12 8)"><style>{{styles}}</style>
{{lines}}{{backgrounds}}{{matrix}}</g>"""


def record() -> None:
    """Run the demo, and keep what its folder said at some moments, without what belongs to this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder, script = Path(name), Path(__file__).parents[2] / "examples" / "elastic.py"
        words = ["--cpu", "--elastic", "1:3", "--replicas", "3", "--meet", f"file://{folder}/meet"]
        words += ["--run-dir", str(folder / "run"), str(script), "--dies_at", "400"]
        launcher = subprocess.Popen([sys.executable, "-m", "farflung", "launch", *words])
        looks: dict[str, Any] = {}
        while launcher.poll() is None:
            time.sleep(0.2)
            with suppress(ConfigError):
                run = ObservedRun(folder / "run")
                since = {event.kind.value: run.now - event.time for event in run.events}
                for key in [key for key in MOMENTS if since.get(key[0], 0.0) > key[1] and key not in looks]:
                    signs = [json.loads(path.read_text()) for path in (folder / "run" / "ranks").glob("*.json")]
                    looks[key] = {"at": run.now, "signs": [sign | {"host": "node1"} for sign in signs]}
        facts = json.loads((folder / "run" / "run.json").read_text())
        files = {name: (folder / "run" / f"{name}.jsonl").read_text().splitlines() for name in FILES}
        rows = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
        rows["events"] = rows["events"][1:]
        rows["rounds"] = [{key: row[key] for key in SEEN} for row in rows["rounds"]]
    facts = {"script": "elastic.py", "started": facts["started"], "host": "node1", "pid": 1, "world": {}}
    kept = {"facts": facts, "looks": list(looks.values()), **rows}
    text = json.dumps(json.loads(json.dumps(kept), parse_float=lambda word: round(float(word), 3)))
    KEPT.write_text(text.replace(", {", ",\n{") + "\n", encoding="utf-8")


def frames(kept: dict[str, Any]) -> list[Console]:
    """Return the screens at the moments that were kept, each from a folder as it was then."""
    found = []
    for look in kept["looks"]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "ranks").mkdir()
            (folder / "run.json").write_text(json.dumps(kept["facts"]))
            for file in FILES:
                rows = [row for row in kept[file] if row["time"] <= look["at"]]
                (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            for sign in look["signs"]:
                path = folder / "ranks" / f"replica{sign['member']}.json"
                path.write_text(json.dumps(sign))
                os.utime(path, (sign["time"], sign["time"]))
            console = Console(file=io.StringIO(), width=_WIDTH, record=True, color_system="truecolor")
            console.print(screen(ObservedRun(folder, clock=partial(float, look["at"])), _WIDTH))
        found.append(console)
    return found


def draw(target: Path = TARGET) -> None:
    """Write the screens to `target`, one after the other, as SVG that moves where motion is welcome."""
    consoles = frames(json.loads(KEPT.read_text(encoding="utf-8")))
    lines, whole = max(console.export_text(clear=False).count("\n") for console in consoles), _FRAME_S * len(consoles)
    drawn = [
        console.export_svg(code_format=_FRAME.format(delay=_FRAME_S * number - whole), unique_id=f"f{number}")
        for number, console in enumerate(consoles)
    ]
    size = {"width": round(12.2 * _WIDTH) + 24, "height": round(24.4 * lines) + 24}  # rich's cells
    shown = _SVG.format(**size, whole=whole, share=100 / len(drawn), frames="\n".join(drawn))
    target.write_text(shown, encoding="utf-8")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    if "--record" in sys.argv[1:]:
        record()
    draw()
