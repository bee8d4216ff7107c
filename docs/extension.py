# SPDX-License-Identifier: Apache-2.0
"""An extension of Python-Markdown, for `mkdocs.yml`: a site reads pages that are written for GitHub."""

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

REPOSITORY = "https://github.com/farflung/farflung/blob/main/"
_OUTSIDE = re.compile(r"(?<=\]\()(?:\.\./)+(?=(?:src|tests|benchmarks|examples)[/)])")
_FENCE = re.compile(r"^(\s*```\w+) (.+)$")


class _AsOnGitHub(Preprocessor):
    """What follows a fence's language is a title (`sh on node1`), or for our tests alone (`python run`).

    Links that leave `docs` lead to the repository.
    """

    def run(self, lines: list[str]) -> list[str]:
        return [_OUTSIDE.sub(REPOSITORY, _FENCE.sub(_fence, line)) for line in lines]


def _fence(match: re.Match[str]) -> str:
    return match[1] if match[2] == "run" else f'{match[1]} title="{match[2]}"'


class GitHubPages(Extension):
    """Before fences are found (25 in Python-Markdown and its extensions)."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_AsOnGitHub(md), "as_on_github", 40)
