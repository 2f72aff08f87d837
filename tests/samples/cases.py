"""Runs many quick cases in one test.

pytest takes some milliseconds for each case of `parametrize`: more than most of these cases take.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["each"]


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but all cases run in one test; a failure tells its case.

    Args:
        names: of the test's arguments, with commas between them.
        cases: a value for one name, a tuple of values for several.
    """
    arguments, known = [name.strip() for name in names.split(",")], [*cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            assert known, "there is no case"
            for case in known:
                values = case if len(arguments) > 1 else (case,)
                given = dict(zip(arguments, values, strict=True))
                try:
                    test(**fixtures, **given)
                except BaseException as error:
                    error.add_note(f"in the case {given}")
                    raise

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__dict__ |= {"pytestmark": getattr(test, "pytestmark", [])}
        return run

    return decorate
