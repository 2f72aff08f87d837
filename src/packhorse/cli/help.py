"""What the help shows of types and arguments: words for people, not the types of Python.

Versions of typer differ in what they show of an annotation (`<list[Path]>`, `<bool>`); here each
parameter gets a word of its own. So do brackets: `SRC...` must be there, `[NAME]` may.
"""

from enum import Enum
from pathlib import Path
from typing import Any

import typer

__all__ = ["plain_types"]

_WORDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def plain_types(command: Any, parent: typer.Context | None = None) -> Any:
    """The command, with words for the types of all options and arguments of it and below."""
    context = typer.Context(command, parent=parent, **command.context_settings)
    for parameter in (*command.params, command.get_help_option(context)):
        if parameter is not None:
            _name_type(parameter)
            _show_usage(parameter)
    for below in getattr(command, "commands", {}).values():
        plain_types(below, context)
    return command


def _name_type(parameter: Any) -> None:
    if not hasattr(parameter, "type_descriptor"):
        return  # an older version, whose own words are plain
    word = _word(parameter)
    if parameter.param_type_name == "argument":
        # Its metavar is its name; the type stands beside it, in newer versions.
        parameter.display_type_rich = lambda ctx: word
    elif getattr(parameter, "is_flag", False):
        parameter.metavar = ""
    elif parameter.metavar is None:
        parameter.metavar = word


def _show_usage(parameter: Any) -> None:
    if parameter.param_type_name == "argument":
        name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
        pieces = [name if parameter.nargs == 1 else f"{name}..."]
        parameter.get_usage_pieces = lambda ctx: pieces


def _word(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    kind = getattr(annotation, "__args__", (annotation,))[0]  # of a list that of its items
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(item.value) for item in kind)
    return _WORDS.get(kind, "TEXT")
