# SPDX-License-Identifier: Apache-2.0
"""The pages say what is so: links lead somewhere, named tests exist, shown commands parse and print what is shown.

A fenced block that opens with ```python run is executed. One that guards its main part by `__name__` starts processes,
so it runs as a script of its own; the others run in this process, each in a fresh folder.
"""

import ast
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from farflung.launch.main import farflung
from farflung.testing.patience import patience
from tests.launch.screen import started
from tests.python import run_farflung, run_python

ROOT = Path(__file__).parent.parent.parent
TOP = ("README.md", "README.zh.md", "CONTRIBUTING.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
ROOMS = sorted(p.name for p in (ROOT / "src" / "farflung").iterdir() if (p / "__init__.py").exists())
DOORS = {"utils", "commands", "test_utils"}

REPOSITORY = "https://github.com/farflung/farflung"
_ON_THE_WEB = re.compile(rf"{REPOSITORY}/(?:blob|tree|raw)/main/")
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
_OURS = "(?:Config|State|Type|Checkpoint)Error|WrongType|Unsupported|CollectiveMismatch|RankFailure|\\w+Warning"
_ERROR = re.compile(rf"`{{1,2}}(?:{_OURS}): (.+?)`{{1,2}}(?: \||:|$)", re.MULTILINE)
_PATH = re.compile(r"`((?:src|tests|benchmarks|examples|docs)/[\w./-]*)(?:::(\w+))?`")


def blocks(word):
    """The fenced blocks whose info string is `word`, as (page, line, content)."""
    found = []
    for page, text in TEXTS.items():
        for match in _FENCE.finditer(text):
            if match[1].strip() == word:
                marks = [pytest.mark.package] * ("transformers import" in match[2])
                line = text[: match.start()].count("\n") + 1
                found.append(pytest.param(match[2], marks=marks, id=f"{page}:{line}"))
    return found


def prose(text):
    return _FENCE.sub("", text)


def words(page):
    """A page of docs without its ends of lines."""
    return " ".join(TEXTS[f"docs/{page}.md"].split())


def results(name):
    """The lines of a file in benchmarks/results."""
    file = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    names = re.findall(r"""(?:^::: |<a id=")([\w.]+)""", text, re.MULTILINE)  # of the reference, on the site
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles} | set(names)


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files_and_headings(page):
    for target in _LINK.findall(prose(TEXTS[page])):
        own = _ON_THE_WEB.match(target)
        if target.startswith(("http://", "https://")) and not own:
            continue
        path, _, anchor = target[own.end() if own else 0 :].partition("#")
        file = (ROOT if own else (ROOT / page).parent) / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{page}: no heading for {target}"


@pytest.mark.parametrize("page", [page for page in TEXTS if page.endswith(".zh.md")])
def test_a_page_in_chinese_has_the_code_headings_and_links_of_the_one_in_english(page):
    here, there = TEXTS[page], TEXTS[page.replace(".zh", "")]
    assert _FENCE.findall(here) == _FENCE.findall(there)
    assert re.findall(r"^#+ ", prose(here), re.MULTILINE) == re.findall(r"^#+ ", prose(there), re.MULTILINE)
    linked = [{link.replace(".zh", "") for link in _LINK.findall(prose(text))} for text in (here, there)]
    assert {link for link in linked[0] ^ linked[1] if "README" not in link} == set()
    assert sorted(re.findall(r"\d+", prose(here))) == sorted(re.findall(r"\d+", prose(there))), "other figures"


def test_links_of_the_readme_work_where_a_package_index_shows_it():
    relative = [target for target in _LINK.findall(TEXTS["README.md"]) if not target.startswith(("https://", "#"))]
    assert relative == []
    assert f'Repository = "{REPOSITORY}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


MEASURE = r"1/\d+|\d[\d.,]*[ -]?(?:%|times|s\b|ms|[kMG]?B\b|[MG]bit)"


@pytest.mark.parametrize("page", ["why", "faq"])
def test_figures_are_quoted_from_the_pages_that_have_them(page):
    """Each stands in a link to its page, word for word; those pages are compared with results."""
    for quote, target in re.findall(r"\[([^\]]*\d[^\]]*)\]\((\w+)\.md[^)]*\)", words(page)):
        assert quote in words(target), f"{page}: {target}.md doesn't say `{quote}`"
    assert re.findall(MEASURE, _LINK.sub("", words(page))) == []


@cache
def functions_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_tests_that_are_named_exist(page):
    for path, test in _PATH.findall(prose(TEXTS[page])):
        assert (ROOT / path).exists(), f"{page} names {path}, which does not exist"
        if test:
            assert test in functions_in(path), f"{page} names {path}::{test}; there is no such test"


def test_each_row_of_differences_names_a_test():
    last = re.findall(r"^\|.+\|.+\|.+\|(.+)\|$", TEXTS["docs/migrating.md"], re.MULTILINE)
    last = [cell for cell in last if "---" not in cell and cell.strip() != "test"]
    assert len(last) > 20
    assert [cell for cell in last if "::test_" not in cell] == []


@pytest.mark.parametrize("page", TEXTS)
def test_no_page_repeats_an_error_of_ours_which_says_itself_what_to_do(page):
    assert _ERROR.findall(TEXTS[page]) == []


THROUGH_ROOMS = {"elastic"}  # pages on what takes its way through several rooms


def test_every_room_has_a_page_and_the_index_leads_to_it():
    pages = sorted(path.stem for path in (ROOT / "docs" / "concepts").glob("*.md") if path.stem != "README")
    assert pages == sorted({room for room in ROOMS if room not in DOORS} | THROUGH_ROOMS)
    links = _LINK.findall(TEXTS["docs/concepts/README.md"])
    assert set(pages) <= {link.removesuffix(".md") for link in links}


@pytest.mark.parametrize("text", blocks("sh"))
def test_commands_that_are_shown_parse(text):
    for line in text.splitlines():
        command = shlex.split(line, comments=True)
        if command[:1] == ["farflung"]:
            parse(farflung, command[1:])


@pytest.mark.parametrize("text", blocks("console"))
def test_commands_print_what_is_shown(text, tmp_path, monkeypatch):
    """A console block is a prompt with a command, and all that it prints, but for blanks at the ends of lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for shown in text.removeprefix("$ ").split("\n$ "):
        line, _, expected = shown.partition("\n")
        program, *arguments = shlex.split(line)
        assert program == "farflung"
        done = CliRunner().invoke(farflung, arguments)
        assert done.exit_code == 0, done.output
        assert [word.rstrip() for word in done.output.rstrip().splitlines()] == expected.rstrip().splitlines()


def test_the_page_of_the_command_shows_what_it_prints():
    assert "```console\n$ farflung plan " in TEXTS["docs/cost.md"]
    assert "```sh\n" not in TEXTS["docs/cost.md"], "a command without what it prints"


def parse(command, arguments):
    """Have `command` read `arguments` as it would, without doing anything; a flag that does not exist is an error."""
    name = next((word for word in arguments if not word.startswith("-")), None)
    context = click.Context(command)
    inner = command.get_command(context, name) if isinstance(command, click.Group) and name else None
    if inner is None:
        command.make_context(command.name, list(arguments))
        return
    at = arguments.index(name)
    command.make_parser(context).parse_args(arguments[:at])
    parse(inner, arguments[at + 1 :])


@pytest.mark.parametrize("text", blocks("python run"))
def test_examples_run(text, tmp_path, monkeypatch):
    script = tmp_path / "example.py"
    script.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if "__main__" in text:
        run_python("-W", "error", script)
    else:
        runpy.run_path(str(script))


@pytest.mark.parametrize("text", blocks("python"))
def test_examples_that_need_more_around_them_are_python_at_least(text):
    compile(text, "page", "exec")


# ---- the ways of readers, docs/start: short, first in docs/README.md, and what they show runs
WAYS = ("ddp", "accelerate", "machines", "notebook")
LONGEST = 600  # words to the first success and what to read next
ALL_PAGES = 61_000


@pytest.mark.parametrize("way", WAYS)
def test_a_way_is_short_and_says_what_success_is(way):
    text = TEXTS[f"docs/start/{way}.md"]
    assert len(text.split()) <= LONGEST
    assert "**You have succeeded**" in text
    assert "pip install" in text


def test_the_ways_are_the_first_links_of_the_start():
    links = re.findall(r"\]\((.+?)\)", TEXTS["docs/README.md"])
    assert links[: len(WAYS)] == [f"start/{way}.md" for way in WAYS]
    assert sorted(path.stem for path in (ROOT / "docs" / "start").iterdir()) == sorted(WAYS)


def test_the_pages_have_few_words():
    """As `find docs -name '*.md' | xargs cat | wc -w` counts them: what grows here must be said shorter elsewhere."""
    assert sum(len(text.split()) for page, text in TEXTS.items() if page.startswith("docs/")) <= ALL_PAGES


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS[:2])
def test_the_script_of_a_way_runs_with_its_commands(way, newcomer):
    fences = _FENCE.findall(TEXTS[f"docs/start/{way}.md"])
    (script,) = (code for title, code in fences if title == "python train.py")
    (newcomer / "train.py").write_text(script, encoding="utf-8")
    alone, outer = (run_farflung(*words) for words in launches(fences))
    assert "round" not in alone.stderr
    assert re.search(r"farflung: round 2\d, step (192|200)", outer.stderr)
    (success,) = (code for title, code in fences if title == "text")
    shown = {without_figures(line) for line in success.splitlines()}
    assert shown <= {without_figures(line) for line in (outer.stdout + outer.stderr).splitlines()}


@pytest.mark.long
def test_the_way_of_machines_that_come_and_go_does_what_it_says(newcomer):
    fences = _FENCE.findall(TEXTS["docs/start/machines.md"])
    line, _ = launches(fences)
    folder = next(word for word in line if word.startswith("file://"))
    words = [f"file://{newcomer}/run" if word == folder else word for word in line]
    words[words.index("elastic.py")] = str(ROOT / "examples" / "elastic.py")
    begun, lost = (code for title, code in fences if title == "text")
    with started(*words) as first:
        first.wait_for(pattern(begun.splitlines()[1]))
        with started(*words) as second:
            process = second.wait_for(r"^process (\d+): begins")[1]
            for said in begun.splitlines():
                first.wait_for(pattern(said))
            os.kill(int(process), signal.SIGKILL)
            second.wait_for(pattern(lost.splitlines()[0]))
            for said in lost.splitlines()[1:]:
                first.wait_for(pattern(said))
            first.wait_for(r"generation 4: .*\nprocess \d+: step \d")
            for screen in (first, second):
                screen.process.send_signal(signal.SIGINT)
            for screen in (first, second):
                assert screen.ended() == 128 + signal.SIGINT, screen.text
    with started(*words) as again:
        assert int(again.wait_for(r"^process \d+: begins at step (\d+)")[1]) > 0


@pytest.mark.long
def test_the_quickstart_is_scripts_whose_commands_print_what_it_shows(newcomer):
    fences = _FENCE.findall(TEXTS["docs/quickstart.md"])
    for title, code in fences:
        if title.startswith("python "):
            (newcomer / title.split()[1]).write_text(code, encoding="utf-8")
    shown = "".join(code for title, code in fences if title == "console scripts")
    commands = re.findall(r"^\$ (.+)\n((?:(?!\$).+\n)+)", shown, re.MULTILINE)
    assert len(commands) == shown.count("$ ") >= 5
    tools = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    for command, expected in commands:
        tool, *words = shlex.split(command)
        start = tools.get(tool) or [sys.executable, "-m", "farflung"]
        said = subprocess.run([*start, *words], capture_output=True, text=True, timeout=patience(120))
        assert said.returncode == 0, said.stderr
        printed = {without_figures(line) for line in (said.stdout + said.stderr).splitlines()}
        if "--outer auto" in command and "plain data parallelism is best here" in said.stderr:
            # On a busy machine steps take so long that gradients cost little: then there are no rounds.
            expected = re.sub(r"^farflung: round .+\n", "", expected, flags=re.MULTILINE)
        assert {without_figures(line) for line in expected.splitlines()} <= printed, (command, said.stderr)


def without_figures(line):
    """A line without what is one machine's: its numbers, and their units."""
    return re.sub(r"\d+(\.\d+)?( [kM]?B)?", "N", line)


def pattern(line):
    """What matches a line that a page shows, on any machine."""
    return re.sub(r"node0:\d+|\d+", lambda found: r"\S+" if ":" in found[0] else r"\d+", "^" + re.escape(line))


def launches(fences):
    """The words of the launches that a page shows, in order."""
    lines = [line for _, code in fences for line in code.splitlines() if line.startswith("farflung launch")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.fixture
def newcomer(home, monkeypatch):
    """The empty home of somebody who has installed Farflung, and set nothing."""
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    return home


# ---- docs/laws.md and the tests know the same laws
LAWS = re.findall(r"^(\d+)\. `([\w-]+)`: ", TEXTS["docs/laws.md"], re.MULTILINE)


def cited():
    """The names of all laws that tests cite; a mark on anything but a test is an error, as pytest would ignore it."""
    names = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.law" not in (text := file.read_text(encoding="utf-8")):
            continue
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.law"]
        tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        assert set(marks) <= {mark for test in tests for mark in test.decorator_list}, file
        names |= {ast.literal_eval(mark.args[0]) for mark in marks}
    return names


def test_each_law_has_a_number_a_name_of_its_own_and_a_test_and_each_name_that_is_cited_is_a_law():
    numbers, names = zip(*LAWS, strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert len(set(names)) == len(names)
    assert cited() == set(names)
