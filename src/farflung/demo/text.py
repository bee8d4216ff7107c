# SPDX-License-Identifier: Apache-2.0
"""What the demo learns to write: the sources of Python's standard library, or any folder of text, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from farflung.base.errors import ConfigError

# Modules that every Python from 3.10 to 3.14 ships as one file of this name. The lists are fixed, so that a result of
# one machine can be compared with that of another; the sources themselves differ a little between versions.
TRAIN_MODULES = """
argparse ast base64 bdb calendar codecs configparser contextlib copy csv difflib dis doctest enum filecmp fileinput
ftplib functools gettext glob gzip heapq imaplib inspect ipaddress locale mailbox mimetypes modulefinder netrc ntpath
optparse os pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint pyclbr pydoc queue random runpy
sched selectors shelve shlex smtplib socket socketserver ssl statistics subprocess symtable tabnanny tarfile threading
timeit tokenize trace traceback tracemalloc types typing uuid warnings wave webbrowser zipapp
asyncio/base_events asyncio/events asyncio/locks asyncio/queues asyncio/selector_events asyncio/sslproto
asyncio/streams asyncio/tasks asyncio/unix_events asyncio/windows_events collections/__init__
concurrent/futures/_base concurrent/futures/process concurrent/futures/thread
email/_header_value_parser email/feedparser email/generator email/header email/headerregistry email/message email/utils
html/parser http/client http/cookiejar http/cookies http/server importlib/_bootstrap importlib/_bootstrap_external
json/decoder json/encoder logging/__init__ logging/config logging/handlers
multiprocessing/connection multiprocessing/context multiprocessing/forkserver multiprocessing/heap
multiprocessing/managers multiprocessing/pool multiprocessing/queues multiprocessing/shared_memory
multiprocessing/synchronize multiprocessing/util
unittest/case unittest/loader unittest/main unittest/mock unittest/result unittest/runner
urllib/parse urllib/request urllib/robotparser wsgiref/handlers wsgiref/validate
xml/dom/expatbuilder xml/dom/minidom xml/etree/ElementTree xml/sax/saxutils xmlrpc/client xmlrpc/server
zoneinfo/_zoneinfo
"""
VALIDATION_MODULES = "fractions getpass shutil sqlite3/dump tempfile textwrap weakref"


@dataclass(frozen=True)
class Text:
    """What to train on and what to validate on, and the files that were left out because they hold no text."""

    train: bytes
    validation: bytes
    left_out: tuple[str, ...] = ()


def load_text(data: str | None) -> Text:
    """Return the text of the folder `data`, or of the standard library when it is None."""
    return stdlib_text(Path(sysconfig.get_paths()["stdlib"])) if data is None else folder_text(Path(data))


def stdlib_text(root: Path) -> Text:
    """Read the listed sources of the standard library that lies in `root`."""
    train, validation = _sources(TRAIN_MODULES, root), _sources(VALIDATION_MODULES, root)
    listed = train + validation
    missing = [str(file.relative_to(root)) for file in listed if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(listed)} sources of Python's standard library are missing from {root}: "
            f"{', '.join(missing)}. Install the full standard library (some systems keep it in a package of its own), "
            "or train on text of yours with --data FOLDER."
        )
    return Text(b"".join(map(Path.read_bytes, train)), b"".join(map(Path.read_bytes, validation)))


def folder_text(folder: Path) -> Text:
    """Read every file under `folder` that is UTF-8 text, in the order of their paths; hidden ones are not looked at.

    The last tenth of each file is for validation.
    """
    if not folder.is_dir():
        raise ConfigError(f"--data {folder}: there is no such folder.")
    train, validation, left_out = [], [], []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        content = file.read_bytes()
        if not _is_text(content):
            left_out.append(str(name))
            continue
        cut = len(content) - len(content) // 10
        train.append(content[:cut])
        validation.append(content[cut:])
    if not train:
        raise ConfigError(f"--data {folder}: none of its {len(left_out)} visible files is UTF-8 text.")
    return Text(b"".join(train), b"".join(validation), tuple(left_out))


def check_length(text: Text, *, context: int, sequences: int) -> None:
    """Check that the text is long enough for one step of `sequences` sequences, and for one to validate on."""
    needs = {"train": sequences * context + 1, "validate": context + 1}
    for part, least in needs.items():
        length = len(text.train if part == "train" else text.validation)
        if length < least:
            raise ConfigError(
                f"The text to {part} on has {length} bytes, and {least} are the least for sequences of {context}. "
                "Bring more text, or take a smaller --size, --batch or --processes."
            )


def _sources(modules: str, root: Path) -> list[Path]:
    return [root / f"{name}.py" for name in modules.split()]


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
