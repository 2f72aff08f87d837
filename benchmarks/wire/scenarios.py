"""The scenarios of `run.py wire`: what the ranks run, and how their figures become one table.

A scenario is a function `run(rank, world, group, options) -> dict` that every rank calls, and a
function `merge(results, shared=...) -> dict` that turns their results into what is kept. Both are
named "module:function", so that nothing is imported before it is needed. `options` holds what
`Scenario.options` makes from the command line, and "device". To add one, add a line to `SCENARIOS`
and its table to report.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.wire.links import Links
from benchmarks.wire.ranks import launch

__all__ = ["SCENARIOS", "Scenario", "Settings", "measure"]


@dataclass(frozen=True)
class Settings:
    """What the command line chooses for all scenarios.

    Attributes:
        rounds: how often each arm is timed.
        nbytes: of the weights or rows that are sent.
        threads: that a codec may use.
        densities: of the stand-in for weight updates.
        trace: folder of a trace of weight updates, or None.
        trace_steps: of each learning rate in the trace.
        arms: names of the arms, or None for all.
    """

    rounds: int
    nbytes: int
    threads: int
    densities: tuple[str, ...]
    trace: str | None = None
    trace_steps: int = 1
    arms: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Scenario:
    """One row of the plan.

    Attributes:
        what: in words.
        run: what each rank calls, as "module:function".
        merge: makes one result of those of all ranks, as "module:function".
        options: its options, from the settings and the links.
    """

    what: str
    run: str
    merge: str
    options: Callable[[Settings, Links], dict[str, Any]]


def _module(name: str, what: str, options: Callable[[Settings, Links], dict[str, Any]]) -> Scenario:
    """A scenario whose two functions have their usual names in a module of this package."""
    return Scenario(what, f"benchmarks.wire.{name}:run", f"benchmarks.wire.{name}:merge", options)


def _link_nbytes(links: Links) -> int:
    """Bytes that take about .4 s at the rate, in whole MiB."""
    bits = links.rate.bits or 10_000_000_000
    return max(1, round(0.4 * bits / 8 / 2**20)) << 20


def _update_options(settings: Settings, links: Links) -> dict[str, Any]:
    keys = ("rounds", "nbytes", "threads", "densities", "trace", "trace_steps", "arms")
    return {key: getattr(settings, key) for key in keys}


def _collective_options(settings: Settings, links: Links) -> dict[str, Any]:
    keys = ("rounds", "threads", "arms")
    # A rank sends half as much as the weights have: at 100 Mb/s a round of all arms takes long.
    return {key: getattr(settings, key) for key in keys} | {"nbytes": settings.nbytes // 2}


def _fsdp_options(settings: Settings, links: Links) -> dict[str, Any]:
    return {key: getattr(settings, key) for key in ("rounds", "nbytes", "arms")}


def _dlrm_options(settings: Settings, links: Links) -> dict[str, Any]:
    return {key: getattr(settings, key) for key in ("rounds", "arms")}


def _rate_options(settings: Settings, links: Links) -> dict[str, Any]:
    return {"nbytes": _link_nbytes(links)}


SCENARIOS = {
    "rates": _module("rates", "what the links carry", _rate_options),
    "updates": _module("updates", "weight updates, trainer to workers", _update_options),
    "collectives": _module("collectives", "collectives without loss", _collective_options),
    "fsdp": _module("fsdp", "a training step under FSDP2", _fsdp_options),
    "dlrm": _module("dlrm", "a training step of a DLRM", _dlrm_options),
}


def measure(
    name: str, links: Links, world: int, settings: Settings, *, timeout: float
) -> dict[str, Any]:
    """Run one scenario on some links.

    Args:
        name: a key of `SCENARIOS`.
        links: that connect the ranks.
        world: the number of ranks.
        settings: of the command line.
        timeout: seconds until all ranks are ended.

    Returns:
        What its `merge` returns, without the cases in which none of the chosen arms takes part.
    """
    scenario = SCENARIOS[name]
    options = scenario.options(settings, links)
    results = launch(links, scenario.run, options, world=world, timeout=timeout)
    found = _function(scenario.merge)(results, shared=links.is_shared)
    if "cases" in found:
        found["cases"] = [case for case in found["cases"] if case["rows"]]
    return found


def _function(name: str) -> Callable[..., dict[str, Any]]:
    module, _, function = name.partition(":")
    found: Callable[..., dict[str, Any]] = getattr(import_module(module), function)
    return found
