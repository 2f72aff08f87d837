"""Files of a Debian package, without installing it: so this needs no root."""

import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["fetch", "main"]


def fetch(name: str, inside: str, folder: Path, package: Path | None) -> None:
    """Put a folder of a package in its place.

    Args:
        name: the package's name.
        inside: the folder within the package.
        folder: where it goes; it stays as it is if it is there.
        package: the package's file; None to download it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if package is None:
            subprocess.run(["apt-get", "download", name], cwd=scratch, check=True)
            package = next(Path(scratch).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
        if not folder.exists():
            (Path(scratch) / inside).rename(folder)


def main(name: str, inside: str, folder: Path, script: str, argv: list[str]) -> int:
    """Fetch a folder of a package, unless it is there.

    Args:
        name, inside, folder: as for `fetch`.
        script: the command that does this, for the message of a failure.
        argv: the package's file, if it is here already.

    Returns:
        The exit status.
    """
    if folder.is_dir():
        print(f"{folder} is there already")
        return 0
    try:
        fetch(name, inside, folder, Path(argv[0]) if argv else None)
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"{error}\nThe package {name} could not be fetched. On another system than Debian or "
            f"Ubuntu, get it from packages.debian.org, and give its file: "
            f"python {script} FILE.deb (dpkg-deb unpacks it)",
            file=sys.stderr,
        )
        return 1
    return 0
