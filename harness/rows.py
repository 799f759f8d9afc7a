"""The rows: the environments every recipe runs in, and the interpreters of this machine that can run them.

A row is `requirements/ROW.in` with its hashed lock `requirements/ROW.txt`. Adding the two adds the row; nothing else
names it. Only the standard library and packaging are used here, since noxfile.py imports this module.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from packaging.markers import Marker
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
# The first that a row allows and the machine has is used. 3.14 has wheels for every lock but is not run in CI.
PYTHONS = ("3.13", "3.12", "3.14", "3.11")
HEADER = ("why", "python", "env")


class RowError(Exception):
    """A row's file is wrong: the message names the file, what was expected and what came."""


@dataclass(frozen=True)
class Row:
    """One environment: a Flax release with its jax, or that release in another NNX mode."""

    name: str
    flax: Version
    jax: Version
    python: SpecifierSet
    why: str
    env: dict[str, str] = field(default_factory=dict, hash=False)
    folder: Path = REQUIREMENTS

    @property
    def mode(self) -> str:
        """`"tree"` where the row turns graph mode off, else `"graph"`."""
        return "tree" if self.env.get("NNX_GRAPH_MODE") == "0" else "graph"

    @property
    def lock(self) -> Path:
        """The hashed lock that the row's environment is installed from."""
        return self.folder / f"{self.name}.txt"

    def interpreter(self, available: dict[str, str]) -> str | None:
        """The version in `available` (version to path) that this row runs under, or None."""
        return next((v for v in PYTHONS if v in available and self.python.contains(v)), None)

    def lacks(self, available: dict[str, str]) -> str:
        """Why no interpreter of `available` serves this row, and the remedy."""
        found = ", ".join(available) or "none"
        return (
            f"row {self.name} is not run here: it needs Python {self.python}, this machine has {found}. "
            f"Install one of Python {', '.join(v for v in PYTHONS if self.python.contains(v))} and run again."
        )


def _lines(path: Path) -> list[str]:
    """The lines of a requirements file, with the files it includes by `-r` put in place."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        include = re.match(r"-r\s+(\S+)", line)
        lines += _lines(path.parent / include[1]) if include else [line]
    return lines


def read(path: Path) -> Row:
    """Read one `ROW.in`. Raises RowError for an unknown or missing header line, a missing pin or a missing lock."""
    header = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"#\s*(\w+):\s*(.+)", line):
            if match[1] not in HEADER:
                raise RowError(f"{path.name}: unknown header `{match[1]}`; known: {', '.join(HEADER)}")
            header[match[1]] = match[2].strip()
    for key in ("why", "python"):
        if key not in header:
            raise RowError(f"{path.name}: header line `# {key}: ...` is missing")
    pins = dict(m.groups() for line in _lines(path) if (m := re.match(r"(flax|jax)==(\S+)", line)))
    for package in ("flax", "jax"):
        if package not in pins:
            raise RowError(f"{path.name}: expected a pin `{package}==VERSION`, found none")
    try:
        python = SpecifierSet(header["python"])
    except InvalidSpecifier as error:
        raise RowError(
            f"{path.name}: `# python: {header['python']}` is not a version range: {error}"
        ) from None
    pairs = [pair.partition("=") for pair in header.get("env", "").split()]
    if bad := [name + rest for name, equals, rest in pairs if not equals]:
        raise RowError(f"{path.name}: `# env:` takes NAME=VALUE pairs, found {' '.join(bad)}")
    row = Row(
        name=path.stem,
        flax=Version(pins["flax"]),
        jax=Version(pins["jax"]),
        python=python,
        why=header["why"],
        env={name: value for name, _, value in pairs},
        folder=path.parent,
    )
    if not row.lock.exists():
        raise RowError(f"{path.name}: its lock {row.lock.name} is missing; run `nox -s lock`")
    return row


def load(folder: Path = REQUIREMENTS) -> list[Row]:
    """All rows, newest Flax first and graph mode before tree mode. A row's file name begins with its release."""
    rows = [read(path) for path in folder.glob("[0-9]*.in")]
    if not rows:
        raise RowError(f"no row in {folder.name}/: expected files such as 0.12.8.in")
    return sorted(rows, key=lambda row: (row.flax, row.mode == "graph"), reverse=True)


def pins(lock: Path, here: bool = False) -> dict[str, str]:
    """The versions that a lock pins, by package, a package with several (by marker) with all; empty without a lock.

    With `here`, only what the markers select for this interpreter and machine.
    """
    text = lock.read_text(encoding="utf-8") if lock.exists() else ""
    found: dict[str, list[str]] = {}
    for name, version, marker in re.findall(r"^([\w.-]+)==([^\s;\\]+)(?: ; ([^\\\n]+))?", text, re.MULTILINE):
        if not here or not marker or Marker(marker.strip()).evaluate():
            found.setdefault(name, []).append(version)
    return {name: " or ".join(versions) for name, versions in found.items()}


def interpreters() -> dict[str, str]:
    """The Pythons of this machine that run, version to path, in order of preference. Nothing is downloaded.

    Looks at this interpreter, at PATH, and where pyenv keeps its versions: a pyenv shim that is not activated is on
    PATH but fails, so each candidate is run once.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for version in PYTHONS:
        candidates = [
            shutil.which(f"python{version}"),
            *sorted(map(str, pyenv.glob(f"{version}.*/bin/python"))),
        ]
        if ".".join(map(str, sys.version_info[:2])) == version:
            candidates.insert(0, sys.executable)
        for path in filter(None, candidates):
            if _version_of(path) == version:
                found[version] = path
                break
    return found


def _version_of(path: str) -> str | None:
    """`"3.12"` for an interpreter that runs, None for one that does not."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        run = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
