# SPDX-License-Identifier: Apache-2.0
"""What tests of engines share whose runs have a key: the key in a file, a script that shows all there is to see, and
whether the run was sealed and nothing has shown the key.
"""

from __future__ import annotations

from pathlib import Path

from tests.launch.test_replicas import TRAINS, until_further
from tests.waits import until

KEY = "5eed" * 16
SHOWS = TRAINS.replace("if sys.argv[1:] else", "if sys.argv[2:] else") + (
    "import subprocess\nprint(subprocess.getoutput('ps -ewwo args'), flush=True)\n"
)


def write_key(home: Path) -> Path:
    """Write the script and the key of a run; return the file of the key."""
    (home / "train.py").write_text(SHOWS)
    path = home / "run7.key"
    path.touch(0o600)
    path.write_text(f"{KEY}\n")
    return path


def end_soon(folder: Path) -> None:
    """Let the replicas train on for a while, and end."""
    until(lambda: (folder / "at").exists())
    until_further(folder)
    (folder / "last").write_text("1")


def check_sealed_and_unseen(home: Path, where: Path, *texts: str) -> None:
    """Check all objects of the address `where`, all files below `home` but the key's own, and what was printed."""
    values = [file.read_bytes() for file in where.rglob("*.value")]
    assert values
    assert all(content.startswith(b"farflung sealed1") for content in values)
    files = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert [path.name for path, content in files.items() if KEY.encode() in content] == ["run7.key"]
    assert any(b"ps -ewwo args" in content for content in [*files.values(), *(text.encode() for text in texts)])
    assert not any(KEY in text for text in texts)
