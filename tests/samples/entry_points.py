"""An environment in which the entry points of pyproject.toml are installed, whether the tests run
from the sources or from an installed package."""

import os
import sys
import tomllib
from pathlib import Path

import packhorse

ROOT = Path(__file__).parents[2]


def environment_of(folder: Path) -> dict[str, str]:
    """Writes what an installer writes about entry points to a folder, and returns variables for a
    process that finds them there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "packhorse-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packhorse\nVersion: 0\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    package = Path(packhorse.__file__).parents[1]
    path = [str(folder), str(package), *filter(None, sys.path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}
