"""A call that gets little memory. Only a process of its own may try this: after a lack of memory,
other threads of the process may have failed too."""

import resource
from collections.abc import Callable

__all__ = ["error_within"]


def error_within(nbytes: int, call: Callable[[], object]) -> str:
    """The name of the error that a call raises when the process may map this many bytes more than
    it has now, or "fine".

    Between the two limits nothing here takes memory. A name of the module would, because its
    dictionary may have to grow, and so would a string.
    """
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limited = (used + nbytes, resource.RLIM_INFINITY)
    unlimited = (resource.RLIM_INFINITY,) * 2
    kind = None
    resource.setrlimit(resource.RLIMIT_AS, limited)
    try:
        call()
    except BaseException as error:
        kind = type(error)
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    return kind.__name__ if kind else "fine"
