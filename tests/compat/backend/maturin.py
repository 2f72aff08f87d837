"""Stands in for the build tool of safetensors while pip fetches its source distribution.

pip asks a build tool for the metadata of a source distribution, even if nothing is built. The real
tool needs Rust and a registry of crates. The metadata lies in the distribution already.
"""

import shutil
from email.parser import Parser
from pathlib import Path

__all__ = ["prepare_metadata_for_build_wheel"]


def prepare_metadata_for_build_wheel(folder: str, settings: object = None) -> str:
    """Write the metadata of the distribution in the working folder, and return the name of the
    folder that holds it."""
    fields = Parser().parsestr(Path("PKG-INFO").read_text())
    target = Path(folder) / f"{fields['Name']}-{fields['Version']}.dist-info"
    target.mkdir()
    shutil.copyfile("PKG-INFO", target / "METADATA")
    return target.name
