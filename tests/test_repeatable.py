"""Repeatable builds: the same executed notebooks give the same bytes, wherever, whenever and after whatever build."""

import os
import subprocess
import sys

import pytest

from harness import rows
from tests.site import SHOWN, SITE
from tests.tiny import Project, difference


@pytest.fixture
def made(tmp_path):
    """Makes projects that are the same, each in a folder of its own."""

    def make(name):
        (tmp_path / name).mkdir()
        return Project(tmp_path / name)

    return make


def test_two_builds_are_the_same_bytes(made):
    one, other = made("one"), made("another folder")
    one.build(env={"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"})
    other.build(env={"TZ": "America/Lima", "LC_ALL": "C", "PYTHONHASHSEED": "2"})
    assert not difference(one.site, other.site)
    one.build()
    assert not difference(one.site, other.site), "built again, with nothing changed"


def test_a_build_after_a_change_is_the_build_from_nothing(made):
    old, new = made("old"), made("new")
    old.build()
    (old.folder / "recipes" / "second.py").rename(old.folder / "recipes" / "third.py")
    for project in (old, new):
        (project.folder / "recipes" / "second.py").unlink(missing_ok=True)
        project.add("third")
        project.add("first", title="Another title")
        index = project.folder / "index.md"
        index.write_text(index.read_text().replace("second", "third"))
        sheet = project.folder / "docs" / "_static" / "site.css"
        sheet.write_text(sheet.read_text() + "\n.other { color: red }\n")
    old.build()
    new.build()
    assert not difference(old.site, new.site)
    assert "Another title" in (old.site / "recipes" / "first.html").read_text()


def test_the_site_built_from_nothing_is_the_site(tmp_path):
    """The whole site once more, in other folders."""
    command = ["sphinx", "-q", "-W", "-n", "-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "html")]
    environment = {**os.environ, "NNX_SITE_ROWS": " ".join(SHOWN)}
    subprocess.run([sys.executable, "-m", *command], cwd=rows.ROOT, env=environment, check=True)
    assert not difference(SITE, tmp_path / "html")
