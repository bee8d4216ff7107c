# SPDX-License-Identifier: Apache-2.0
"""The site that `make docs` builds: its links, its search, and an entry for each public name."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag

import pytest

from farflung.config.recipes import RECIPES
from farflung.testing.patience import patience
from tests.docs import reference
from tests.docs.examples import EXAMPLES
from tests.docs.test_pages import REPOSITORY, ROOT, TEXTS
from tests.python import run_python

pytestmark = pytest.mark.package
CHROMIUM = shutil.which("chromium")
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\ntheme:\n")[0]
PAGES = re.findall(r": ([\w./-]+\.md)$", NAV, re.MULTILINE)


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and which files it loads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loads = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        target = found.get("href") or found.get("src")
        if target:
            (self.links if tag == "a" or found.get("rel") in ("next", "prev") else self.loads).add(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "src").symlink_to(ROOT / "src")
    run_python("-m", "zensical", "build", "--strict", cwd=folder, env=os.environ | {"PYTHONPATH": "docs"})
    return folder / "site"


@pytest.fixture(scope="module")
def built(site):
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_each_page_has_its_place_and_the_start_leads_to_it():
    files = {page.removeprefix("docs/") for page in TEXTS if page.startswith("docs/")}
    assert sorted(PAGES) == sorted(files), "give each page its place in mkdocs.yml"
    ours = {page for page in PAGES if "/" not in page and page != "README.md"}
    linked = set(re.findall(r"\]\(([\w.-]+\.md)\)", TEXTS["docs/README.md"]))
    assert linked == ours, "docs/README.md leads to each page that is in no folder"


def test_pages_of_reference_are_what_the_doors_make_them():
    expected = {path.relative_to(ROOT).as_posix(): text for path, text in reference.pages().items()}
    there = {page: text for page, text in TEXTS.items() if page.startswith("docs/reference/")}
    assert there == expected, "run `python -m tests.docs.reference`"


def test_each_public_name_has_an_entry(site):
    for page, entries in reference.entries().items():
        text = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
        missing = [each.there for each in entries if each.there == each.own and f'id="{each.own}"' not in text]
        assert not missing, f"{page}: {missing}"


def test_links_of_built_pages_lead_to_files_and_anchors(site, built):
    broken = []
    for path, page in built.items():
        for target in page.links | page.loads:
            if target.startswith(("http://", "https://", "mailto:", "data:", "javascript:")) or path.name == "404.html":
                continue
            name, anchor = map(unquote, urldefrag(target))
            file = (path.parent / name).resolve() if name else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (anchor and file in built and anchor not in built[file].anchors):
                broken.append(f"{path.relative_to(site)}: {target}")
    assert not broken, "\n".join(broken)


def test_links_into_the_repository_name_files_that_are_there_and_a_page_loads_nothing_from_elsewhere(built):
    links = " ".join(link for page in built.values() for link in page.links)
    named = set(re.findall(rf"{REPOSITORY}/(?:blob|tree)/main/([^#\s]+)", links))
    assert {name for name in named if not (ROOT / name).exists()} == set()
    assert not {load for page in built.values() for load in page.loads if re.match(r"(https?:)?//", load)}


PROBE = """
<script>
addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const copies = document.querySelectorAll("pre").length - document.querySelectorAll(".md-code__button").length;
  document.querySelector(".md-search__button").click();
  const looking = setInterval(() => {
    const search = [...document.querySelectorAll("*")].map(one => one.shadowRoot).find(root => root);
    const input = search && search.querySelector("input");
    if (!input) return;
    if (input.value !== "pseudo-gradient") {
      input.value = "pseudo-gradient";
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }
    const hits = [...search.querySelectorAll("[role=listbox] a")].map(one => one.getAttribute("href"));
    if (!hits.length) return;
    clearInterval(looking);
    const out = document.createElement("pre");
    out.id = "probe";
    out.textContent = JSON.stringify({ wide, copies, hits });
    document.body.append(out);
  }, 50);
});
</script></html>"""


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("size", ["1280,900", "390,844"])
def test_a_browser_finds_words_and_copies_code_without_a_complaint(site, size, tmp_path):
    page = site / f"probe{size}.html"
    page.write_text((site / "quickstart.html").read_text(encoding="utf-8").replace("</html>", PROBE), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=60000"]
    flags += [f"--window-size={size}", f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
    done = subprocess.run([str(CHROMIUM), *flags], capture_output=True, text=True, timeout=patience(120))
    page.unlink()
    assert ":CONSOLE" not in done.stderr, done.stderr
    found = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)[1])
    assert found["wide"] <= 0, "the page is wider than the screen"
    assert found["copies"] == 0, "a block of code without a button to copy it"
    assert any("outer" in hit or "quickstart" in hit for hit in found["hits"]), found


def test_names_that_people_call_have_an_example():
    called = {f"farflung.outer.{name}" for name in ("OuterLoop", *RECIPES)} | {"farflung.Accelerator"}
    assert set(EXAMPLES) == called | {f"farflung.elastic.{name}" for name in ("launched_membership", "place", "Reader")}
    entered = {each.own for entries in reference.entries().values() for each in entries if each.there == each.own}
    assert set(EXAMPLES) <= entered
