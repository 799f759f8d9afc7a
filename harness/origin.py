"""Where the site comes from: the addresses of site and repository, where the build knows them, and the commits.

On GitHub Actions both addresses follow from GITHUB_REPOSITORY; NNX_SITE_URL names another site. Elsewhere they are
unknown, and the pages leave out what needs them.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from urllib.parse import urlencode

from harness.contract import Recipe
from harness.rows import ROOT, Row

COLAB = "https://colab.research.google.com/github"
BRANCH, PUBLISHED = "main", "gh-pages"  # the branch of the sources, and the one that holds the built site


@dataclass(frozen=True)
class Origin:
    """The address of the site, ending in a slash, and `owner/name` of its repository; each empty where unknown."""

    site: str = ""
    repository: str = ""
    host: str = "https://github.com"

    def edit(self, recipe: Recipe) -> str:
        """Where a recipe is edited."""
        return f"{self.host}/{self.repository}/edit/{BRANCH}/recipes/{recipe.name}.py"

    def colab(self, recipe: Recipe) -> str:
        """Where a recipe runs in the browser: Colab opens the notebook from the branch of the built site."""
        return f"{COLAB}/{self.repository}/blob/{PUBLISHED}/colab/{recipe.name}.ipynb"

    def report(self, recipe: Recipe, row: Row, versions: dict[str, str], commit: str) -> str:
        """A new issue that already names the recipe, its commit, and the versions that the page was executed with."""
        named = ", ".join(f"{name} {versions[name]}" for name in ("flax", "jax", "optax") if name in versions)
        body = (
            f"Page: {self.site}recipes/{recipe.name}.html\nThe page was executed with: {named} (row {row.name})\n"
            f"Commit of the recipe: {commit or 'unknown'}\nMy versions:\n\nWhat I expected:\n\nWhat came:\n"
        )
        query = urlencode({"title": f"{recipe.name}: ", "body": body})
        return f"{self.host}/{self.repository}/issues/new?{query}"


def known() -> Origin:
    """The origin as the environment of this build tells it."""
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    if repository and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"GITHUB_REPOSITORY: expected owner/name, found {repository!r}")
    owner, _, name = repository.partition("/")
    pages = f"{owner.lower()}.github.io"
    site = f"https://{pages}/" + ("" if name.lower() == pages else f"{name}/") if repository else ""
    site = os.environ.get("NNX_SITE_URL", site).strip()
    if site and not re.fullmatch(r"https?://[\w.:-]+(/[\w./-]*)?", site):
        raise ValueError(f"NNX_SITE_URL: expected an address such as https://loops.example/, found {site!r}")
    host = os.environ.get("GITHUB_SERVER_URL", Origin.host)
    return Origin(site.rstrip("/") + "/" if site else "", repository, host)


def commits() -> dict[str, str]:
    """The commit that last changed each recipe, by name; a recipe with changes that no commit has is left out.

    Empty without git or outside of a repository.
    """
    log = _git("log", "--format=commit %h", "--name-only", "--", "recipes")
    changed = {line[3:].strip() for line in _git("status", "--porcelain", "--", "recipes").splitlines()}
    found: dict[str, str] = {}
    commit = ""
    for line in log.splitlines():
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line.startswith("recipes/") and line.endswith(".py") and line not in changed:
            found.setdefault(line.removeprefix("recipes/").removesuffix(".py"), commit)
    return found


def _git(*args: str) -> str:
    try:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
