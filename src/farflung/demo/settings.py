# SPDX-License-Identifier: Apache-2.0
"""The settings and files of a demo run; the command knows them before torch is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """The size of a model: `depth` blocks of `width` numbers a byte, `heads` heads, `context` bytes at a time."""

    depth: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": Shape(depth=2, width=48, heads=2, context=64),
    "small": Shape(depth=3, width=96, heads=4, context=128),
    "medium": Shape(depth=6, width=192, heads=6, context=256),
    "large": Shape(depth=8, width=384, heads=8, context=256),
}


ALONE = "A replica alone"  # the way that sends nothing


@dataclass(frozen=True)
class DemoSettings:
    """One run of the demo."""

    steps: int  # of the optimizer, in each of the ways
    processes: int
    size: str  # a key of `SIZES`
    data: str | None  # a folder of text; None takes the sources of the standard library
    output: str  # where results, picture and model go
    every: int  # steps between two synchronizations of Local SGD, DiLoCo and each fragment of streaming DiLoCo
    batch: int  # sequences that one process sees in one step
    seed: int  # fixes initial weights and the order of the data
    bandwidth_bps: float  # of the slow line that times are computed for

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    def path(self, name: str) -> Path:
        """Return where the file `name` lies in the output folder."""
        return Path(self.output) / name

    def save(self) -> Path:
        """Write the settings to the output folder, for the processes to read, and return the file."""
        target = self.path(SETTINGS_FILE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return target

    @classmethod
    def load(cls, file: str | Path) -> DemoSettings:
        return cls(**json.loads(Path(file).read_text(encoding="utf-8")))


SETTINGS_FILE = "settings.json"
RESULTS_FILE = "results.json"
DEFAULT_OUTPUT = "farflung-demo"
MODEL_FILE = "model.safetensors"
PICTURE_FILE = "curves.png"
REPORT_FILE = "report.html"


@dataclass
class Point:
    """Where a way stood: after `step` steps one process had sent `bytes_sent`, and the validation loss was `loss`."""

    step: int
    bytes_sent: int
    loss: float


@dataclass
class Result:
    """What one way of training came to; seconds and bytes are those of rank 0, without the validation."""

    way: str
    curve: list[Point]  # the last one is the end of the training
    seconds: float  # on this machine
    bytes_sent: int
    line_seconds: float  # what the same training takes on the slow line, by the cost model
    note: str = ""  # why `auto` chose it

    @property
    def loss(self) -> float:
        """The validation loss at the end, in nats a byte."""
        return self.curve[-1].loss

    @property
    def curve_seconds(self) -> list[float]:
        """When each point of the curve is reached on the slow line."""
        return [self.line_seconds * point.step / self.curve[-1].step for point in self.curve]

    def reaches(self, loss: float) -> tuple[float, float]:
        """Return the bytes sent and the seconds on the slow line after which the curve is down at `loss`.

        Between two of its points it is taken for a straight line over the logarithm of the step, which it nearly is.
        """
        after = next(number for number, point in enumerate(self.curve) if point.loss <= loss)
        end, start = self.curve[after], self.curve[max(0, after - 1)]
        share = 1.0 if start.loss == end.loss else (start.loss - loss) / (start.loss - end.loss)
        step = start.step * (end.step / start.step) ** share
        done = 1.0 if start.step == end.step else (step - start.step) / (end.step - start.step)
        sent = start.bytes_sent + done * (end.bytes_sent - start.bytes_sent)
        return sent, self.line_seconds * step / self.curve[-1].step


def save_results(settings: DemoSettings, results: list[Result]) -> None:
    """Write `results` to the output folder."""
    text = json.dumps([asdict(result) for result in results], indent=2)
    settings.path(RESULTS_FILE).write_text(text + "\n", encoding="utf-8")


def load_results(settings: DemoSettings) -> list[Result]:
    """Read what `save_results` wrote."""
    results = json.loads(settings.path(RESULTS_FILE).read_text(encoding="utf-8"))
    return [Result(**{**values, "curve": [Point(**point) for point in values["curve"]]}) for values in results]
