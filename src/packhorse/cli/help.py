"""How the help shows types and arguments: by words such as PATH, not by Python's types.

Versions of typer differ in how they show an annotation (`<list[Path]>`, `<bool>`), so this module
sets the word for each parameter. They differ in brackets too, so it sets these as well: `SRC...` is
required, `[NAME]` is optional.
"""

from enum import Enum
from pathlib import Path
from typing import Any

import typer

__all__ = ["plain_types"]

_WORDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
# Arguments that are paths or URLs; typer gets them as text, because Path would shorten `//`.
_PLACES = ("SRC", "FILE", "SHELF", "DEST")


def plain_types(command: Any, parent: typer.Context | None = None) -> Any:
    """Sets the words for the options and arguments of a command and its subcommands; returns it."""
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
        return  # an older version of typer, which already shows such words
    word = _word(parameter)
    if parameter.param_type_name == "argument":
        # The metavar is the argument's name; newer versions show the type beside it.
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
    kind = getattr(annotation, "__args__", (annotation,))[0]  # for a list, the type of its items
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(item.value) for item in kind)
    return "PATH" if parameter.metavar in _PLACES else _WORDS.get(kind, "TEXT")
