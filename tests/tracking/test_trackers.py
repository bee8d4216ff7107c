# SPDX-License-Identifier: Apache-2.0
"""What each tracker writes, read back where its client is installed; and how clients are called where it isn't."""

import json
import math
import sqlite3
import sys
from collections import UserDict
from enum import Enum
from pathlib import Path
from unittest.mock import MagicMock, call, patch

import numpy as np
import pytest
import torch
import yaml

from farflung import Accelerator
from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ
from farflung.process.run_files import Metrics
from farflung.trackers import tracking
from farflung.tracking import (
    LOGGER_TYPE_TO_CLASS,
    CometMLTracker,
    GeneralTracker,
    JSONLTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from farflung.utils import LoggerType

CONFIG = {"lr": 0.1, "layers": 2, "name": "small", "tied": True}


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(tracker):
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log({"loss": 0.5, "note": "warm"}, step=1)
    tracker.finish()
    return tracker


def test_json_lines_hold_each_event_at_once_and_a_second_run_goes_on(tmp_path):
    tracker = JSONLTracker("project/run", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "where": Path("data"), "dtype": torch.bfloat16, "none": None})
    values = {"loss": torch.tensor(0.5), "grads": np.float32(2), "many": torch.arange(2), 3: math.nan, "inf": -math.inf}
    tracker.log(values, step=7, split="train")
    path = tmp_path / "project" / "run.jsonl"
    written = lines_of(path)
    assert written[0]["config"] == {"lr": 0.1, "where": "data", "dtype": "torch.bfloat16", "none": None}
    assert written[1]["values"] == {"loss": 0.5, "grads": 2.0, "many": [0, 1], "3": "NaN", "inf": "-Infinity"}
    assert (written[1]["step"], written[1]["split"], written[1]["rank"]) == (7, "train", 0)
    tracker.log_table("answers", ["q", "a"], [["1+1", 2]], step=8)
    tracker.finish()
    with path.open("a") as file:
        file.write('{"event": "lo')  # as a full disk leaves it
    run(JSONLTracker("project/run", tmp_path))
    path.write_text(path.read_text().replace('{"event": "lo\n', ""))
    assert [line["step"] for line in lines_of(path)] == [None, 7, 8, None, 1]
    assert lines_of(path)[2]["data"] == [["1+1", 2]]


def test_json_lines_are_in_the_layout_of_a_runs_folder(tmp_path):
    with environ.patched({environ.RUN_FOLDER: str(tmp_path), environ.RUN_ATTEMPT: "2"}):
        metrics = Metrics.of_run()
        metrics.add({"loss": math.nan}, 1)
        metrics.write()
        tracker = JSONLTracker("run", tmp_path)
        tracker.start()
        tracker.log({"loss": math.nan}, step=1)
        tracker.finish()
    (kept,), (logged,) = lines_of(tmp_path / "metrics.jsonl"), lines_of(tracker.path)
    assert [*logged] == [*kept]
    assert logged | {"time": kept["time"]} == kept


def test_steps_are_any_whole_number_and_values_those_of_their_moment_in_any_mapping(tmp_path):
    step, norms, groups = torch.tensor(3), np.ones(2), UserDict({"head": [0.5]})
    with environ.patched({environ.RUN_FOLDER: str(tmp_path)}):
        metrics, tracker = Metrics.of_run(), JSONLTracker("run", tmp_path)
    tracker.start()
    for add in (metrics.add, tracker.log):
        add({"norms": norms, "groups": groups}, step)
        add({"deep": [{"norms": norms}]}, np.int64(4))
    step += 1
    norms += 1
    groups["head"].append(2.0)
    metrics.write()
    tracker.finish()
    for path in (tmp_path / "metrics.jsonl", tracker.path):
        first, second = lines_of(path)
        assert {type(row["step"]) for row in (first, second)} == {int}
        assert (first["step"], first["values"]) == (3, {"norms": [1.0, 1.0], "groups": {"head": [0.5]}})
        assert (second["step"], second["values"]) == (4, {"deep": [{"norms": [1.0, 1.0]}]})


def test_a_full_disk_ends_neither_a_step_nor_the_run(tmp_path):
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    with pytest.warns(UserWarning, match=r"run.jsonl can't be written: No space left .* Training continues"):
        tracker.log({"loss": 1.0}, step=1)
    tracker.finish()


def test_tensorboard_reads_back_what_was_logged(tmp_path, monkeypatch):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = TensorBoardTracker("run", "~", flush_secs=1)
    tracker.start()
    kind = Enum("Kind", {"ADAM": "adam"}, type=str).ADAM
    odd = {"decay": np.float64(0.1), "seed": np.int64(3), "kind": kind, "width": torch.tensor([2])}
    tracker.store_init_configuration({**CONFIG, "betas": [0.9, 0.95], "none": None, **odd})
    values = {"loss": torch.tensor(0.5), "small": np.float32(2), "note": "warm", "two": {"a": 1.0, "b": 2.0}}
    tracker.log(values, step=3)
    with pytest.warns(UserWarning, match="tensorboard does not record 'odd' of type list"):
        tracker.log({"odd": [1, 2], "loss": 0.25}, step=4)
    with pytest.warns(UserWarning, match="tensorboard does not record 'deep' of type dict"):
        tracker.log({"deep": {"a": {"b": 1}}, "small": 3.0}, step=5)
    tracker.log_images({"picture": torch.zeros(2, 3, 4, 4)}, step=4)
    tracker.finish()
    found = accumulator.EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
    assert [event.value for event in found.Scalars("small")] == [2.0, 3.0]
    assert {"note/text_summary"} <= set(found.Tags()["tensors"])
    assert found.Tags()["images"]
    (hparams,) = (tmp_path / "run").rglob("hparams.yml")
    kept = {"betas": "[0.9, 0.95]", "none": "None", "decay": 0.1, "seed": 3, "kind": "adam", "width": 2}
    assert yaml.safe_load(hparams.read_text()) == {**CONFIG, **kept}


@pytest.mark.package
@pytest.mark.long
def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    tracker = WandBTracker("project", name="first", tags=["a"])
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log({"loss": 0.5}, step=1)
    tracker.log_table("answers", columns=["q", "a"], data=[["1+1", 2]], step=1)
    tracker.log_images({"picture": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=2)
    assert dict(tracker.tracker.config) == CONFIG
    assert tracker.tracker.summary["loss"] == 0.5
    tracker.finish()
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0


@pytest.mark.package
@pytest.mark.long
def test_mlflow_writes_to_a_local_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the skinny package has no other local store
    mlflow.set_tracking_uri(tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "far"}')
    kind = LOGGER_TYPE_TO_CLASS["mlflow"]
    outer = kind("project", run_name="outer")
    outer.start()
    many = {f"p{i}": i for i in range(150)}
    with pytest.warns(UserWarning, match="mlflow does not record 'long'"):
        outer.store_init_configuration({**CONFIG, **many, "long": "x" * 10_000})
    with pytest.warns(UserWarning, match="mlflow does not record 'note'"):
        outer.log({"loss": torch.tensor(0.5), "note": "warm"}, step=3)
    (tmp_path / "file.txt").write_text("kept")
    outer.log_artifact(str(tmp_path / "file.txt"))
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    inner = kind("project", run_name="inner")
    inner.start()
    inner.log({"loss": 0.25})
    inner.finish()
    outer.finish()
    stored = mlflow.get_run(outer.tracker.info.run_id)
    assert stored.data.metrics == {"loss": 0.5}
    assert (len(stored.data.params), stored.data.params["name"], stored.data.tags["team"]) == (154, "small", "far")
    nested = mlflow.get_run(inner.tracker.info.run_id)
    assert nested.data.tags["mlflow.parentRunId"] == outer.tracker.info.run_id
    assert stored.info.status == nested.info.status == "FINISHED"


def test_trackio_writes_to_a_local_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # before it is imported
    pytest.importorskip("trackio", reason="trackio is not installed: with its server 60 MB")
    tracker = run(TrackioTracker("project", auto_log_cpu=False))
    assert tracker.tracker.project == "project"
    with sqlite3.connect(tmp_path / "project.db") as stored:
        rows = stored.execute("select step, metrics from metrics").fetchall()
    assert [(step, json.loads(metrics)) for step, metrics in rows] == [(1, {"loss": 0.5, "note": "warm"})]


@pytest.mark.parametrize("kind", [WandBTracker, TrackioTracker])
def test_runs_are_called_as_their_clients_want(kind, monkeypatch):
    client = MagicMock()
    monkeypatch.setitem(sys.modules, kind.name, client)
    tracker = run(kind("project", group="g"))
    assert client.mock_calls == [
        call.init(project="project", group="g"),
        call.config.update(CONFIG, allow_val_change=True),
        call.init().log({"loss": 0.5, "note": "warm"}, step=1),
        call.init().finish(),
    ]
    if hasattr(tracker, "log_images"):
        tracker.log_images({"picture": ["pixels"]}, step=2)
        assert client.mock_calls[-2:] == [call.Image("pixels"), call.init().log({"picture": [client.Image()]}, step=2)]


class Own(GeneralTracker):
    name = "own"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir=None, **kwargs):
        super().__init__()
        self.made_with = run_name, logging_dir, kwargs

    @property
    def tracker(self):
        return self.made_with


@pytest.fixture
def own_class():
    with patch.dict(LOGGER_TYPE_TO_CLASS):
        yield Own


def test_the_trackers_that_are_asked_for_come_once_each(monkeypatch):
    monkeypatch.setattr(tracking, "has_client", lambda name: name in ("tensorboard", "wandb", "jsonl"))
    own = Own("mine")
    assert get_available_trackers() == ["tensorboard", "wandb", "jsonl"]
    assert filter_trackers(None) == []
    assert filter_trackers("wandb") == [LoggerType.WANDB]
    assert filter_trackers([LoggerType.WANDB, "wandb", own, own], "logs") == ["wandb", own]
    assert filter_trackers("all", "logs") == ["tensorboard", "wandb", "jsonl"]
    assert filter_trackers([own, LoggerType.ALL], "logs") == [own, "tensorboard", "wandb", "jsonl"]
    monkeypatch.setattr(tracking, "has_client", lambda name: name in ("wandb", "jsonl"))
    assert filter_trackers("all") == ["wandb"]
    for kind, words, asked in (
        (ConfigError, "pip install tensorboard", ("tensorboard", "logs")),
        (ConfigError, "Logging with `jsonl` requires a `logging_dir`", ("jsonl",)),
        (ConfigError, "Did you mean `wandb`", ("wandbb",)),
        (TypeError, r"Own\(\.\.\.\)", (Own,)),
    ):
        with pytest.raises(kind, match=words):
            filter_trackers(*asked)


def test_a_class_of_ones_own_can_be_registered_by_name(tmp_path, own_class):
    register_tracker_class(own_class)
    accelerator = Accelerator(cpu=True, log_with="own", project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"own": {"color": "red"}})
    assert accelerator.get_tracker("own", unwrap=True) == ("project", str(tmp_path), {"color": "red"})
    with pytest.warns(UserWarning, match="takes the place of the tracker own"):
        register_tracker_class(own_class)
    with pytest.raises(TypeError, match="GeneralTracker"):
        register_tracker_class(dict)
    with pytest.raises(ConfigError, match="needs a name"):
        register_tracker_class(type("Nameless", (GeneralTracker,), {}))


COMET = """
from farflung.tracking import GeneralTracker
class CometTracker(GeneralTracker):
    name, requires_logging_directory, tracker = "comet_ml", False, property(lambda self: self.values)
    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.values = [(run_name, kwargs)]
    def log(self, values, step=None, **kwargs):
        self.values.append((step, values))
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch, own_class):
    """Install a package that brings the trackers `comet_ml`, and `odd`, whose class has another name."""
    (tmp_path / "farflung_comet.py").write_text(COMET)
    metadata = tmp_path / "farflung_comet-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: farflung-comet\nVersion: 1.0\n")
    named = "".join(f"{name} = farflung_comet:CometTracker\n" for name in ("comet_ml", "odd"))
    (metadata / "entry_points.txt").write_text(f"[farflung.trackers]\n{named}")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("farflung_comet", None)


def test_a_package_brings_a_tracker_by_an_entry_point(plugin):
    accelerator = Accelerator(cpu=True, log_with="comet_ml")
    accelerator.init_trackers("project", init_kwargs={"comet_ml": {"online": False}})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert accelerator.get_tracker("comet_ml", unwrap=True) == [("project", {"online": False}), (1, {"loss": 0.5})]
    assert LoggerType.COMETML in get_available_trackers()
    with pytest.raises(ConfigError, match=r"plugins bring comet_ml, odd\. Did you mean `comet_ml`\?"):
        filter_trackers("comet")
    with pytest.raises(ConfigError, match=r"names farflung_comet:CometTracker\. It must name a subclass .* is 'odd'"):
        filter_trackers("odd")


def test_a_tracker_that_nothing_brings_is_an_error_that_says_how_to_add_it():
    known = r"Built in or registered are jsonl, mlflow, [a-z, ]*tensorboard, trackio, wandb; plugins bring none\."
    with pytest.raises(ConfigError, match=rf"log_with is 'comet_ml'\. {known} A package adds .* of GeneralTracker"):
        Accelerator(cpu=True, log_with="comet_ml")
    with pytest.raises(Unsupported, match=r"CometMLTracker belongs to .* entry point in the group `farflung.trackers`"):
        CometMLTracker("project")


def test_a_tracker_class_that_lacks_something_says_what():
    nameless = type("Nameless", (GeneralTracker,), {"requires_logging_directory": False})
    with pytest.raises(NotImplementedError, match="Nameless has no name and no tracker"):
        nameless()
    with pytest.raises(Unsupported, match="no requires_logging_directory"):
        GeneralTracker()
    GeneralTracker(_blank=True).log({"loss": 1.0})


@pytest.mark.parametrize(("rank", "main_only", "is_run"), [("0", True, True), ("1", True, False), ("1", False, True)])
def test_methods_for_the_main_process_know_it_before_there_is_an_accelerator(rank, main_only, is_run, monkeypatch):
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)

    class Early(Own):
        main_process_only = main_only

        @on_main_process
        def start(self):
            return "started"

    assert Early("run").start() == ("started" if is_run else None)
