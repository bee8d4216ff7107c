# SPDX-License-Identifier: Apache-2.0
"""An Accelerator's trackers: on the main process, with what was asked for, and never so that training ends."""

import json
import warnings

import pytest

from farflung import Accelerator
from farflung.base.errors import ConfigError
from farflung.tracking import GeneralTracker
from farflung.utils import ProjectConfiguration
from tests.accelerator.conftest import on_ranks


class Keeping(GeneralTracker):
    """Keeps the calls, and fails in the methods that it is told."""

    name = "keeping"
    requires_logging_directory = False

    def __init__(self, *failing, error=ConnectionError):
        super().__init__()
        self.calls, self.failing, self.error = [], failing, error

    @property
    def tracker(self):
        return self.calls

    def _call(self, name, *args):
        self.calls.append((name, *args))
        if name in self.failing:
            raise self.error(f"no server for {name}")

    def start(self):
        self._call("start")

    def store_init_configuration(self, values):
        self._call("config", values)

    def log(self, values, step=None, **kwargs):
        self._call("log", values, step, kwargs)

    def finish(self):
        self._call("finish")


def test_a_run_goes_through_all_trackers_in_order(tmp_path):
    keeping = Keeping()
    project = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"))
    accelerator = Accelerator(cpu=True, log_with=["jsonl", keeping], project_config=project)
    assert accelerator.log_with == ["jsonl", keeping]
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 0.5}, step=1, log_kwargs={"keeping": {"commit": False}})
    assert accelerator.get_tracker("keeping") is keeping
    assert accelerator.get_tracker("keeping", unwrap=True) is keeping.calls
    assert [tracker.name for tracker in accelerator.trackers] == ["jsonl", "keeping"]
    with pytest.raises(ValueError, match=r"no tracker 'wandb'; there is jsonl, keeping"):
        accelerator.get_tracker("wandb")
    with pytest.raises(ConfigError, match="end_training"):
        accelerator.init_trackers("project")
    accelerator.end_training()
    accelerator.end_training()
    assert accelerator.trackers[1] is keeping
    assert keeping.calls == [
        ("start",),
        ("config", {"lr": 0.1}),
        ("log", {"loss": 0.5}, 1, {"commit": False}),
        ("finish",),
    ]
    lines = [json.loads(line) for line in (tmp_path / "logs" / "project.jsonl").read_text().splitlines()]
    assert (lines[0]["config"], lines[1]["values"], len(lines)) == ({"lr": 0.1}, {"loss": 0.5}, 2)


def test_arguments_for_a_tracker_that_does_not_exist_are_refused():
    accelerator = Accelerator(cpu=True, log_with=Keeping())
    with pytest.raises(ConfigError, match=r"init_kwargs is 'wandbb'; .* Did you mean `wandb`\?"):
        accelerator.init_trackers("project", init_kwargs={"wandbb": {}})
    accelerator.init_trackers("project", init_kwargs={"wandb": {"name": "x"}, "keeping": {}})  # not asked for: unread
    with pytest.raises(ConfigError, match=r"log_kwargs is 'keping'"):
        accelerator.log({"loss": 0.5}, log_kwargs={"keping": {}})
    accelerator.end_training()


def test_without_trackers_log_does_nothing():
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("project", config={})
    accelerator.log({"loss": 0.5})
    assert accelerator.trackers == accelerator.log_with == []
    accelerator.get_tracker("wandb").log({"loss": 0.5})


@pytest.mark.parametrize("how", ["append", "set"])
def test_trackers_that_a_script_adds_record_and_end_with_the_run(how):
    accelerator, keeping, asked = Accelerator(cpu=True), Keeping(), Keeping()
    if how == "append":
        accelerator.trackers.append(keeping)
    else:
        accelerator.trackers = [keeping]
    accelerator.log({"loss": 0.5}, step=1)
    assert keeping.calls == [("log", {"loss": 0.5}, 1, {})]
    accelerator.log_with = [asked]
    accelerator.init_trackers("project")
    assert accelerator.trackers == [keeping, asked]
    accelerator.log({"loss": 0.25}, log_kwargs={"keeping": {}})
    accelerator.end_training()
    assert asked.calls == [("start",), ("log", {"loss": 0.25}, None, {}), ("finish",)]
    assert [call[0] for call in keeping.calls] == ["log", "start", "log", "finish"]


def test_the_trackers_to_start_are_checked_where_a_script_sets_them():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"log_with is 'wandbb'"):
        accelerator.log_with = ["wandbb"]
    assert accelerator.log_with == []


def test_logging_before_the_run_has_begun_is_said_once():
    accelerator = Accelerator(cpu=True, log_with=Keeping())
    with pytest.warns(UserWarning, match="before init_trackers"):
        accelerator.log({"loss": 0.5})
    accelerator.log({"loss": 0.5})


@pytest.mark.package
def test_what_a_tracker_does_not_record_is_said_once_at_the_line_that_logs_it(tmp_path):
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("project")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for step in range(3):
            accelerator.log({"loss": 0.5, "many": [step, step]}, step=step)
    assert [(one.filename, str(one.message).partition(": ")[0]) for one in said] == [
        (__file__, "The tracker tensorboard does not record 'many' of type list")
    ]
    accelerator.end_training()


def test_a_failing_tracker_is_named_once_counted_and_does_not_stop_the_others():
    failing, good = Keeping("config", "log", "finish"), Keeping()
    failing.name = "failing"
    accelerator = Accelerator(cpu=True, log_with=[failing, good])
    with pytest.warns(
        UserWarning, match=r"tracker failing failed in store_init_configuration: ConnectionError: no ser"
    ):
        accelerator.init_trackers("project", config={"lr": 0.1})
    for step in range(3):
        accelerator.log({"loss": 0.5}, step=step)
    with pytest.warns(UserWarning, match="The tracker failing lost 5 events of this run"):
        accelerator.end_training()
    assert [name for name, *_ in good.calls] == ["start", "config", "log", "log", "log", "finish"]


def test_a_tracker_that_does_not_start_does_not_end_training_but_a_wrong_argument_does():
    accelerator = Accelerator(cpu=True, log_with=Keeping("start"))
    with pytest.warns(UserWarning, match="failed in start"):
        accelerator.init_trackers("project")
    first, failing = Keeping(), Keeping("start", error=TypeError)
    accelerator = Accelerator(cpu=True, log_with=[first, failing])
    for _ in range(2):
        with pytest.raises(TypeError, match="no server for start"):
            accelerator.init_trackers("project")
        assert accelerator.trackers == []
    failing.failing = ()
    accelerator.init_trackers("project")
    assert accelerator.trackers == [first, failing]
    assert first.calls == [("start",), ("finish",)] * 2 + [("start",)]
    accelerator.end_training()


@on_ranks(2)
def test_only_the_main_process_tracks(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project", config={"lr": 0.1})
    for step, log in enumerate((accelerator.log, accelerator.get_tracker("jsonl").log)):
        log({"rank": accelerator.process_index}, step=step)
    assert [each.name for each in accelerator.trackers] == ["jsonl"] * accelerator.is_main_process
    accelerator.end_training()
    accelerator.wait_for_everyone()
    lines = [json.loads(line) for line in (tmp_path / "project.jsonl").read_text().splitlines()]
    assert [line["values"]["rank"] for line in lines[1:]] == [0, 0]
