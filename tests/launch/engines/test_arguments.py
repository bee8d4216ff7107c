# SPDX-License-Identifier: Apache-2.0
"""The law of arguments: each one, whatever bytes it has, arrives as it was, by every engine and every login shell."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from farflung.base.errors import ConfigError
from farflung.config.launch import LaunchSettings
from farflung.launch.engines.engine import Job
from farflung.launch.engines.kubernetes import Kubernetes
from farflung.launch.engines.slurm import batch_script
from farflung.launch.engines.ssh import Ssh
from farflung.testing.patience import patience
from tests.launch.engines.kubelet import expanded
from tests.python import call_farflung, run_farflung

SHELLS = ("sh", "bash", "dash", "fish", "tcsh")
PARTS = rb"""' " $ \ ! ` * ~ # ; && | { } %s -x 1e-3 $$(HOME) $(HOME) ${HOME} $$ \n !! ^a^b [ ] < >""".split(b" ")
PARTS += [b" ", b"\n", b"\t", b"\r\n", b"\x01", b"\x7f", b"\x81", b"\xff", "\u00e9\u2028".encode(), b"\\\n", b""]
HOSTILE = "it's\n$(touch injected) \\ !x"  # the name of a folder
# The script, and what a shell or srun starts in place of Python: each writes its arguments, with a NUL after each.
DUMP = "import os, sys\nopen('seen', 'wb').write(b''.join(os.fsencode(word) + b'\\0' for word in sys.argv[1:]))\n"


def make_arguments(*, is_text: bool = False) -> list[str]:
    """Return 200 arguments of any bytes but NUL; `is_text`: in valid UTF-8."""
    draw = random.Random(54)
    made = [b"1e-3", b"y", b"", b"--", b"ends in a backslash\\", b"\ntouch injected\n", b"-h", b"~", b"=", b"no"]
    while len(made) < 200:
        parts = [draw.choice(PARTS) if draw.random() < 0.8 else bytes([draw.randrange(1, 256)]) for _ in range(6)]
        made.append(b"".join(parts[: draw.randrange(1, 7)]))
    words = [os.fsdecode(word) for word in made]
    return [word.encode("utf-8", "replace").decode() for word in words] if is_text else words


@pytest.fixture
def dump(home, monkeypatch):
    """A program that writes its arguments, in a folder with a bad name; and an ssh and an srun that start it."""
    (home / "bin").mkdir()
    program = home / "bin" / "dump"
    program.write_text(f"#!{sys.executable} -IS\n{DUMP}")
    (home / "bin" / "ssh").write_text('#!/bin/bash\nexec "$LOGIN" -c "${!#}"\n')  # as sshd does
    (home / "bin" / "srun").write_text('#!/bin/bash\nwhile [[ $1 = --* ]]; do shift; done\nexec "$@"\n')
    for file in (home / "bin").iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    folder = home / HOSTILE
    folder.mkdir()
    monkeypatch.chdir(folder)
    return program


def seen(folder: Path) -> list[str]:
    assert not list(folder.parent.rglob("injected"))
    return [os.fsdecode(word) for word in (folder / "seen").read_bytes().split(b"\0")[:-1]]


@pytest.mark.parametrize("shell", SHELLS)
def test_over_ssh_whatever_the_login_shell_is(shell, dump, monkeypatch):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    here, arguments = Path.cwd(), make_arguments()
    monkeypatch.setenv("LOGIN", shell)
    settings = LaunchSettings(use_cpu=True, hosts="a", engine_options=f"python={dump}")
    engine = Ssh(Job(settings, "train.py", tuple(arguments), here / "run"))
    line = engine.described().partition("\n")[2].removeprefix("a: ")
    assert (line.isascii(), line.isprintable()) == (True, True)
    for reader in {"sh", shell}:  # of the printed line
        subprocess.run([reader, "-c", line], check=True, timeout=patience(60))
        assert seen(here)[-201:] == ["train.py", *arguments]
        (here / "seen").unlink()


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_in_the_batch_script_of_slurm(kind, dump):
    here, arguments = Path.cwd(), make_arguments()
    more = {"elastic": "1:2", "meet": "s3://bucket/run"} if kind == "elastic" else {}
    settings = LaunchSettings(engine="slurm", engine_options=f"python={dump}", **more)
    script = batch_script(Job(settings, "train.py", tuple(arguments), here / "run"))
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert script.isascii()
    assert "touch" not in "".join(directives)
    (here / "slurm.sh").write_text(script)
    subprocess.run(["bash", "slurm.sh"], check=True, timeout=patience(60))
    assert seen(here)[-201:] == ["train.py", *arguments]


def read_by_kubectl(text: str) -> dict:
    """Read a manifest as kubectl does or, where there is none, as JSON's superset by PyYAML, which is YAML 1.1."""
    if shutil.which("kubectl") is None:
        return next(yaml.safe_load_all(text))
    Path("job.yaml").write_text(text.partition("\n---\n")[0])
    words = ["kubectl", "label", "--local", "-o", "json", "-f", "job.yaml", "read=yes"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=patience(60))
    return json.loads(done.stdout)


def test_in_the_manifest_of_kubernetes(home):
    arguments = make_arguments(is_text=True)
    settings = LaunchSettings(engine="kubernetes", engine_options="image=a,gpus=1")
    engine = Kubernetes(Job(settings, "train.py", tuple(arguments), home / "run"))
    for manifest in (read_by_kubectl(engine.described()), engine._manifests()[0]):
        [container] = manifest["spec"]["template"]["spec"]["containers"]
        words = [expanded(word, {"HOME": "/root", "X": "y"}) for word in container["command"]]
        assert words[-201:] == ["train.py", *arguments]


REFUSED = [
    ("kubernetes", "image=a", "run", os.fsdecode(b"a\xffb"), "is not valid UTF-8, and the API of Kubernetes"),
    ("ray", "cpus=1", "run", os.fsdecode(b"a\xffb"), "is not valid UTF-8, and Ray takes"),
    ("slurm", "time=1\n2", "run", "1", "a directive of sbatch is one line"),
    ("slurm", "partition=cpu", "a\\b", "1", r"takes \ in names of output files for patterns of its own"),
]


@pytest.mark.parametrize(("engine", "options", "folder", "argument", "words"), REFUSED)
def test_what_an_engine_cannot_carry_is_refused(engine, options, folder, argument, words, home, capsys):
    (home / "train.py").touch()
    launch = ["launch", "--engine", engine, "--engine-options", options, "--run-dir", folder, "train.py"]
    assert call_farflung(*launch, argument) == 2
    assert words in capsys.readouterr().err
    assert not (home / folder).exists()


@pytest.mark.parametrize("word", ["a\0b", "\ud800"])
def test_what_no_program_can_be_given_is_refused(word, home):
    with pytest.raises(ConfigError, match="can't be an argument"):
        Job(LaunchSettings(), "train.py", (word,), home / "run")


def test_by_the_launcher_that_an_engine_starts_and_in_what_a_dry_run_prints(home):
    (home / "train.py").write_text(DUMP)
    arguments = make_arguments()
    job = Job(LaunchSettings(use_cpu=True, num_processes=1), "train.py", tuple(arguments), home / "run")
    run_farflung(*job.command())
    assert seen(home) == arguments
    (home / "seen").unlink()
    words = ("launch", "--dry-run", "--cpu", "--run-dir", "none", "train.py", *arguments)
    printed = run_farflung(*words).stdout
    [line] = [line for line in printed.splitlines() if line.startswith("command: ")]
    subprocess.run(["sh", "-c", line.removeprefix("command: ")], check=True, timeout=patience(60))
    assert seen(home) == arguments
