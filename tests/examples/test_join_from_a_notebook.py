# SPDX-License-Identifier: Apache-2.0
"""The notebook that people paste trains in one run with another one and a command line, and may be interrupted."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from farflung.testing.patience import patience
from tests.examples.scripts import FOLDER

PAGE = FOLDER.parent / "docs" / "start" / "notebook.md"
NOTEBOOK = FOLDER / "join_from_a_notebook.ipynb"
# More than any position, until a file says where all are to end.
STEPS = """
import pathlib, time
class Later:
    def __gt__(self, position):
        time.sleep(0.01)
        end = pathlib.Path("end")
        pathlib.Path("at").write_text(str(position))
        return not end.exists() or position < int(end.read_text())
STEPS = Later()
"""
TOTAL = 'print("RESULT", float(sum(one.double().sum() for one in model.parameters())))'


class Notebook:
    """The notebook in a kernel of its own, as one who fills in the address runs it."""

    def __init__(self, address):
        from nbclient import NotebookClient
        from nbformat import read, v4

        book = read(NOTEBOOK, 4)
        for cell in book.cells:
            told = cell.source.replace("hf://NAMESPACE/BUCKET/run7", address).replace("STEPS = 5000", STEPS)
            cell.source = re.sub(r"^%pip.*", "", told, flags=re.MULTILINE)
        book.cells.append(v4.new_code_cell(TOTAL))
        self.cells = book.cells
        (self._trains,) = (cell for cell in book.cells if "notebook_launcher(" in cell.source)
        self._client = NotebookClient(book, timeout=None, kernel_name="python3")

    async def run(self, again=False):
        """Run all cells; `again`: once more the one that trains, when it was interrupted."""
        from nbclient.exceptions import CellExecutionError

        async with self._client.async_setup_kernel():
            for number, cell in enumerate(self.cells):
                if cell is self._trains and again:
                    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                        await self._client.async_execute_cell(cell, number)
                await self._client.async_execute_cell(cell, number)

    def interrupt(self):
        os.kill(self._client.km.provisioner.pid, signal.SIGINT)

    @property
    def said(self):
        return "".join(out.get("text", "") for cell in self.cells for out in cell.get("outputs", ()))

    @property
    def picture(self):
        pages = [out["data"]["text/html"] for out in self._trains.outputs if "text/html" in out.get("data", ())]
        return pages[-1] if pages else ""


async def until(condition, *tasks):
    """Wait for a condition, and no longer once a task has failed."""
    while not condition():
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.05)


async def meet(address, folder):
    """Train two notebooks and a script in one run, interrupt a notebook and run its cell again; return what all say."""
    first, second = Notebook(address), Notebook(address)
    cell = first._trains.source.partition("model = notebook_launcher(")[0]
    (folder / "train.py").write_text(f"{cell}model = train()\n{TOTAL}\n")
    line = [sys.executable, "-m", "farflung", "launch", "--cpu", "--elastic", "1:8", "--meet", address, "train.py"]
    begun = asyncio.create_task(first.run())
    await until(lambda: "training begins with 1 replica" in first.said, begun)
    script = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    again = asyncio.create_task(second.run(again=True))
    try:
        await until(lambda: "3 replicas train" in first.said, begun, again)
        second.interrupt()
        await until(lambda: "3 replicas train" in first.said.partition("was killed by SIGINT")[2], begun, again)
        (folder / "end.part").write_text(str(int((folder / "at").read_text() or 0) + 100))
        (folder / "end.part").rename(folder / "end")
        await asyncio.gather(begun, again)
        words = await asyncio.to_thread(script.communicate)
    finally:
        script.kill()
    lines = re.search(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1].splitlines()
    shown, said = ({re.sub(r"\w+:\d+|\d", "#", line) for line in text} for text in (lines, first.said.splitlines()))
    assert shown <= said
    return [*(re.search("RESULT (.*)", said)[1] for said in (first.said, second.said, words[0])), first.picture]


@pytest.mark.package("nbclient", "ipykernel")
@pytest.mark.timeout(240)
def test_two_notebooks_and_a_command_line_train_one_model_though_a_cell_is_interrupted(hub, home, monkeypatch):
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    monkeypatch.setenv("FARFLUNG_HEARTBEAT_S", "1")  # at which launchers print what has happened
    *results, picture = asyncio.run(asyncio.wait_for(meet(hub, home), patience(150)))
    assert len(results) == 3
    assert len(set(results)) == 1
    assert "replica 0" in picture
    assert "finished" in picture


def test_the_page_shows_lines_of_the_notebook():
    book = "".join("".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])
    shown = re.findall(r"^```python notebook\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    assert [line for line in shown if line not in book] == []
