"""Links between ranks with a known rate: network namespaces, veth pairs and `tc tbf`.

Every rank gets a network namespace of its own with one interface, `eth0`, and a bridge in another
namespace connects them, as a switch does. A token bucket (tbf) holds both directions of each
interface to the rate: one at the rank's own end and one at the bridge's. Nothing is delayed: the
kernel may have no netem, so the latency is that of the machine.

- **Burst.** Idle time fills the bucket, and this much passes at full speed afterwards. A large
  bucket would hide the link from small payloads, a small one cannot reach the rate: packets of
  64 KiB (which the kernel splits only at the interface) must fit in it. See `RATES`.
- **Queue.** It holds more than all senders may have under way, so nothing is dropped and no figure
  depends on the luck of a retransmission.
- **TCP** uses CUBIC, the usual default, whatever this machine is set to.

Names carry the process id, so that several runs go on beside each other. Namespaces of a process
that was killed are removed by the next one that starts. Making links needs root; `obstacle` says
why there are none, and `loopback` is the substitute.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "RATES",
    "LinkError",
    "Links",
    "Rate",
    "connect",
    "loopback",
    "obstacle",
    "remove_stale",
    "sent_nbytes",
    "stale",
]

PREFIX = "phw"
DEVICE, LOOPBACK = "eth0", "lo"
COMMANDS = ("ip", "tc")
QUEUE_NBYTES = 16 << 20
CONGESTION = "cubic"
_numbers = itertools.count()


class LinkError(RuntimeError):
    """Namespaces or their links cannot be made; the message says what failed."""


@dataclass(frozen=True)
class Rate:
    """A speed of links.

    Attributes:
        name: how the command line calls it.
        bits: bits a second in each direction, all headers counted; None for no limit.
        burst: bytes that may pass at once after some idle time.
    """

    name: str
    bits: int | None = None
    burst: int = 0


# Bursts are 1.3, .56 and .4 ms of the line. At 100 Mb/s packets of 64 KiB are split before the
# bucket, which costs no time that counts at this rate.
RATES = {
    rate.name: rate
    for rate in (
        Rate("100M", 100_000_000, 16_000),
        Rate("1G", 1_000_000_000, 70_000),
        Rate("5G", 5_000_000_000, 250_000),
        Rate("unshaped"),
    )
}


@dataclass(frozen=True)
class Links:
    """Where the ranks of a run are.

    Attributes:
        rate: the rate that was asked for.
        device: the interface that a rank's connections use, in its namespace.
        namespaces: one for each rank; empty if all ranks use the loopback of this machine.
        bridge: the namespace of the bridge.
    """

    rate: Rate
    device: str
    namespaces: tuple[str, ...] = ()
    bridge: str = ""

    def dropped(self) -> int:
        """Packets that were lost so far at all interfaces, because a queue was full."""
        places = [(name, DEVICE) for name in self.namespaces]
        places += [(self.bridge, f"port{number}") for number in range(len(self.namespaces))]
        return sum(int(_queue(device, "-n", name)["drops"]) for name, device in places)

    @property
    def is_shared(self) -> bool:
        """Whether all ranks use the one interface, whose counter then holds the bytes of all."""
        return not self.namespaces

    def command(self, rank: int) -> list[str]:
        """What precedes the command line of a rank's process."""
        return ["ip", "netns", "exec", self.namespaces[rank]] if self.namespaces else []


def obstacle() -> str | None:
    """Why links cannot be made here, in one line; None if they can."""
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} not found; install iproute2"
    if os.geteuid():
        return "only root may make network namespaces"
    try:
        with connect(1, RATES["1G"]):
            return None
    except LinkError as reason:
        return str(reason)


@contextmanager
def connect(world: int, rate: Rate) -> Iterator[Links]:
    """Make namespaces that are connected at a rate, and remove them afterwards.

    Args:
        world: the number of ranks.
        rate: how fast each of them may send and receive.

    Raises:
        LinkError: the system refuses a step.
    """
    remove_stale()
    stem = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
    bridge, ranks = f"{stem}-b", [f"{stem}-{rank}" for rank in range(world)]
    try:
        _make(bridge, ranks, rate)
        yield Links(rate, DEVICE, tuple(ranks), bridge)
    finally:
        for name in (*ranks, bridge):
            _remove(name)


@contextmanager
def loopback() -> Iterator[Links]:
    """The substitute without links: all ranks use the loopback interface, unshaped."""
    yield Links(RATES["unshaped"], LOOPBACK)


def _make(bridge: str, ranks: list[str], rate: Rate) -> None:
    for name in (bridge, *ranks):
        _ip("netns", "add", name)
    _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
    _ip("-n", bridge, "link", "set", "br0", "up")
    for number, name in enumerate(ranks):
        port = f"port{number}"
        _ip("link", "add", DEVICE, "netns", name, "type", "veth", "peer", port, "netns", bridge)
        _ip("-n", name, "addr", "add", f"10.90.0.{number + 1}/24", "dev", DEVICE)
        for device in (LOOPBACK, DEVICE):
            _ip("-n", name, "link", "set", device, "up")
        # As a property of the route: a namespace may not choose its default freely.
        route = ("route", "change", "10.90.0.0/24", "dev", DEVICE, "congctl", CONGESTION)
        _ip("-n", name, *route)
        _ip("-n", bridge, "link", "set", port, "master", "br0", "up")
        for namespace, device in ((name, DEVICE), (bridge, port)):
            _shape(namespace, device, rate)


def _shape(namespace: str, device: str, rate: Rate) -> None:
    """Hold an interface to a rate. Without one it gets a queue, too, for its counter."""
    kind = ["pfifo", "limit", "20000"]
    if rate.bits is not None:
        kind = ["tbf", "rate", f"{rate.bits}bit", "burst", str(rate.burst)]
        kind += ["limit", str(QUEUE_NBYTES)]
    _call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *kind)


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except OSError as reason:
        raise LinkError(f"{command[0]}: {reason}") from reason
    except subprocess.CalledProcessError as error:
        raise LinkError(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from None
    except subprocess.TimeoutExpired:
        raise LinkError(f"`{' '.join(command)}` does not end") from None
    return done.stdout


def _remove(name: str) -> None:
    """Remove a namespace with its interfaces, and end the processes that are still in it: it would
    live on as long as they."""
    with suppress(LinkError):
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


def stale(names: list[str]) -> list[str]:
    """Those of some namespaces that belong to a process that has ended.

    Args:
        names: all namespaces of the machine.
    """
    out = []
    for name in names:
        found = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-(\d+|b)", name)
        if found and not _is_alive(int(found[1])):
            out.append(name)
    return out


def remove_stale() -> list[str]:
    """Remove what an earlier run left because it was killed; returns the names."""
    lines = _ip("netns", "list").splitlines()
    found = stale([line.split()[0] for line in lines if line.strip()])
    for name in found:
        _remove(name)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sent_nbytes(device: str) -> int:
    """Bytes that an interface of this namespace has sent, with the headers of every packet.

    The kernel splits large packets at the interface, as a network card does. The queue counts
    the headers of all parts; the counter of the interface would count only one, and is used only
    for the loopback, which has no queue.

    Args:
        device: its name.
    """
    if device == LOOPBACK:
        return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
    return int(_queue(device)["bytes"])


def _queue(device: str, *options: str) -> dict[str, Any]:
    """The counters of an interface's queue."""
    found = json.loads(_call("tc", *options, "-s", "-j", "qdisc", "show", "dev", device))
    return dict(found[0])
