"""Carry packages to a GPU machine without a network: `python benchmarks/gpu.py wheels FOLDER`.

Run here, with a network, the command downloads the wheels that Packhorse needs beside PyTorch and
Triton: to be built, to be imported, and to be tested. `gpu.py device --wheels FOLDER` installs
there those that are missing, builds Packhorse if it is not installed, and touches nothing else of
the machine: all of it goes to a folder below FOLDER.
"""

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["PACKAGES", "WheelError", "install", "main"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    # To import it; numpy comes with PyTorch.
    *("zstandard", "xxhash", "ml_dtypes", "safetensors"),
    # To build it.
    *("scikit-build-core", "nanobind", "packaging", "pathspec"),
    # To test it.
    *("pytest", "iniconfig", "pluggy", "pygments", "hypothesis", "sortedcontainers"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")


class WheelError(Exception):
    """Packages cannot be installed; the message says what to do."""


def install(folder: Path) -> None:
    """Install the packages that are missing, and Packhorse, for this process and those it starts.

    Args:
        folder: of wheels that `gpu.py wheels` has downloaded.

    Raises:
        WheelError: there are no wheels, or pip fails.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise WheelError(
            f"{folder} {'has no wheels' if folder.is_dir() else 'is not a folder'}: on a machine "
            f"with a network, run `python benchmarks/gpu.py wheels {folder.name} --python "
            f"{version}`, and carry that folder here"
        )
    site = folder.resolve() / f"installed-{sys.version_info.major}.{sys.version_info.minor}"
    site.mkdir(exist_ok=True)
    sys.path.insert(0, str(site))
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    missing = [wheel for wheel in wheels if not _is_installed(wheel.name.split("-")[0])]
    if missing:
        print(f"installing {', '.join(wheel.name.split('-')[0] for wheel in missing)}", flush=True)
        _pip("install", *_OFFLINE, "--target", str(site), *map(str, missing))
    importlib.invalidate_caches()
    if not _is_built():
        print("building Packhorse", flush=True)
        _pip("install", *_OFFLINE, "--no-build-isolation", "--target", str(site), str(ROOT))
        importlib.invalidate_caches()


_OFFLINE = ("--no-index", "--no-deps", "--no-compile", "--quiet")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _is_built() -> bool:
    """Whether Packhorse is here, with a core for this Python. It is not imported."""
    found = importlib.util.find_spec("packhorse")
    places = (found.submodule_search_locations or []) if found else []
    endings = importlib.machinery.EXTENSION_SUFFIXES
    return any((Path(p) / f"_core{ending}").exists() for p in places for ending in endings)


def _pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        raise WheelError(f"pip {words[0]} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def main(argv: list[str]) -> int:
    """Download the wheels.

    Args:
        argv: the arguments after `wheels`.

    Returns:
        The exit status: 0, or 1 if pip fails.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py wheels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the wheels; it is made")
    parser.add_argument("--python", default="3.12", help="of the other machine; default 3.12")
    parser.add_argument("--package", nargs="+", default=[], help="more packages to carry")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"3\.\d+", args.python):
        parser.error(f"--python is {args.python!r}; it must be a version such as 3.12")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"the folder cannot be made: {error}", file=sys.stderr)
        return 1
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--python-version", args.python, "--implementation", "cp", *platforms]
    own = ["--no-deps", "--only-binary=:all:", "--dest", str(args.folder)]
    try:
        _pip("download", "--quiet", *own, *target, *PACKAGES, *args.package)
    except WheelError as error:
        print(
            f"{error}\nNot all wheels for Python {args.python} were downloaded: see whether this "
            "machine has a network, and whether all packages have wheels for that Python.",
            file=sys.stderr,
        )
        return 1
    wheels = sorted(args.folder.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels for Python {args.python}, {nbytes / 1e6:.0f} MB, in {args.folder}")
    return 0
