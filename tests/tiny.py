"""A copy of the project with two small recipes, built by the project's own noxfile in a process that can be killed."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbformat

from harness import contract, execute, files, rows

# What `nox -s docs` does after recipes were executed and packages installed. The arguments are the rows.
BUILD = """
import os, subprocess, sys
import noxfile

class Session:
    def log(self, text):
        print("session:", text, flush=True)
    warn = log
    def run(self, *command, env=None):
        if command[0] == "sphinx-build":
            command = [sys.executable, "-m", "sphinx", *command[1:]]
        if subprocess.run(command, env={**os.environ, **(env or {})}).returncode:
            sys.exit("session: " + command[-1] + " failed")

noxfile.build(Session(), sys.argv[1:])
"""

RECIPE = """# ---
# jupyter:
#   recipe:
#     summary: {summary}
# ---

# %% [markdown]
# # {title}
#
# The answer.

# %% tags=["snippet"]
total = 1 + 1

# %% tags=["proof"]
assert total == 2
print(total)
"""

PAGE = "---\nmyst: {html_meta: {description: A page.}}\n---\n# Title\n\nText.\n"
INDEX = (
    PAGE
    + "\n## All\n\n[recipes]\n\n```{toctree}\n:caption: All\n:hidden:\nrecipes/first\nrecipes/second\n```\n"
    + "\n```{toctree}\n:hidden:\ndocs/errors\ndocs/releases\n```\n"
)


class Project:
    """The copy in `folder`. Recipes are kept as if they had been executed under `row`, the newest."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.row = rows.load()[0]
        for name in ("harness", "requirements", "docs/_templates", "docs/_static"):
            shutil.copytree(rows.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in map(rows.ROOT.joinpath, ("conf.py", "noxfile.py", "CHANGELOG.md")):
            shutil.copy(path, folder)
        for path in (rows.ROOT / "docs").glob("*.json"):
            shutil.copy(path, folder / "docs")
        (folder / "docs" / "reports.json").write_text("[]")
        (folder / "index.md").write_text(INDEX)
        (folder / "docs" / "errors.md").write_text(PAGE + "\n[errors]\n\n[paste]\n")
        (folder / "docs" / "releases.md").write_text(PAGE + "\n[outcomes]\n")
        for name in ("first", "second"):
            self.add(name)

    def add(self, name: str, title: str = "A toy", summary: str = "One sentence.") -> None:
        """Write a recipe and its executed notebook."""
        path = self.folder / "recipes" / f"{name}.py"
        files.write(path, RECIPE.format(title=title, summary=summary))
        recipe = contract.read(path)
        notebook = nbformat.from_dict(json.loads(json.dumps(recipe.notebook)))
        notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="2\n")]
        notebook.metadata["executed"] = {
            "date": "2026-01-01",
            "python": "3.13.0",
            "versions": rows.pins(self.row.lock),
            "content": execute.content(notebook),
            **execute.sources(recipe, self.row),
        }
        place = execute.path_of(recipe, self.row, self.folder / "build" / "executed")
        files.write(place, nbformat.writes(notebook))

    def start(self, **options) -> subprocess.Popen:
        """Begin to build the site, in a group of processes of its own."""
        environment = {**os.environ, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "", **options.pop("env", {})}
        environment.pop("CI", None)
        return subprocess.Popen(
            [sys.executable, "-c", BUILD, self.row.name],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # which a job in the background ignores
            **options,
        )

    def build(self, **options) -> str:
        """Build the site; returns what was said. Fails where the build does."""
        process = self.start(**options)
        said = process.communicate(timeout=180)[0]
        assert process.returncode == 0, said
        return said

    @property
    def site(self) -> Path:
        """Where the built site is."""
        return self.folder / "build" / "html"


def digests(site: Path) -> dict[str, str]:
    """Every file of a built site, and the digest of its bytes."""
    return {
        path.relative_to(site).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(site.rglob("*"))
        if path.is_file()
    }


def difference(one: Path, other: Path) -> list[str]:
    """The files in which two sites differ."""
    left, right = digests(one), digests(other)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
