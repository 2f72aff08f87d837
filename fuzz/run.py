"""Build and run the fuzz targets, two at a time: `make fuzz`, `make fuzz TIME=600 ARGS=frame`.

Targets of the core are C++ for libFuzzer, built by clang with AddressSanitizer and
UndefinedBehaviorSanitizer; those of the Python side run under atheris. Each starts from the seeds
of `make_corpus.py`, from `fuzz/corpus/`, and from the inputs that earlier runs found. Found inputs
are kept in `build/fuzz/`, with the logs and with every input that broke something. The exit status
is 1 if an input did.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.programs import compile_once

FUZZ = Path(__file__).resolve().parent
ROOT = FUZZ.parent
BUILD = ROOT / "build" / "fuzz"
COMPILER = os.environ.get("CLANG", "clang++")
# Tracing comparisons would take two thirds of the time, and the seeds have the magic numbers.
FLAGS = (
    *(
        "-std=c++20",
        "-Icsrc",
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-ffp-contract=off",  # as the build of the package: the bits of bounded codes depend on it
        "-Wall",
        "-Wextra",
        "-Werror",
    ),
    *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"),
    *("-fno-sanitize-coverage=trace-cmp", "-pthread", "-DPACKHORSE_EXACT_SCRATCH"),
)
# A call that takes longer counts as a hang, and one that takes more memory as a finding.
LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-malloc_limit_mb=512", "-max_len=8192")
TAIL_LINES = 60


@dataclass(frozen=True)
class Target:
    """A fuzz target.

    Attributes:
        name: its name on the command line and in folders.
        source: its file.
        seeds: name of the target whose seeds it uses.
        options: further options of libFuzzer, in addition to the limits.
    """

    name: str
    source: str
    seeds: str
    options: tuple[str, ...] = ()

    @property
    def is_python(self) -> bool:
        """Whether it runs under atheris."""
        return self.source.endswith(".py")


# Targets that take longest to build come first.
TARGETS = (
    Target("round_trip", "round_trip.cpp", "round_trip"),
    Target("decode_tensor", "decode_tensor.cpp", "decode_tensor"),
    Target("plan", "plan.cpp", "decode_tensor"),
    Target("frames", "frames.cpp", "frame"),
    Target("short_tensor", "short_tensor.cpp", "short_tensor"),
    Target("file_header", "file_header.cpp", "file_header"),
    Target("decode_plane", "decode_plane.cpp", "decode_plane"),
    Target("weights", "weights.cpp", "weights"),
    Target("tables", "tables.cpp", "tables"),
    Target("bounded", "bounded.cpp", "bounded"),
    Target("frame", "fuzz_frame.py", "frame"),
    Target("reference", "fuzz_reference.py", "frame"),
    Target("file", "fuzz_file.py", "file", (f"-dict={FUZZ / 'file.dict'}",)),
    Target("manifest", "fuzz_manifest.py", "manifest"),
    Target("update", "fuzz_update.py", "update"),
    Target("piece", "fuzz_piece.py", "piece"),
    Target("request", "fuzz_request.py", "request"),
)
_printing = threading.Lock()


def main(argv: list[str]) -> int:
    """Run the targets that the arguments name.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Fuzz the decoders.")
    names = [target.name for target in TARGETS]
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(names)}")
    parser.add_argument("--time", type=int, default=60, metavar="S", help="seconds for each")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="0: a new one every run")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="targets to run at once")
    parser.add_argument(
        "--build", action="store_true", help="only compile the targets that are not compiled yet"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.targets) - set(names):
        parser.error(f"no target is named {', '.join(sorted(unknown))}; there are {names}")
    chosen = [target for target in TARGETS if not args.targets or target.name in args.targets]
    if not all(target.is_python for target in chosen) and shutil.which(COMPILER) is None:
        print(f"{COMPILER} is missing: install clang (Debian: apt-get install clang)")
        return 1
    with ThreadPoolExecutor(args.jobs) as pool:
        if args.build:
            compiled = [target for target in chosen if not target.is_python]
            good = [command is not None for command in pool.map(build, compiled)]
        else:
            make_seeds()
            good = list(pool.map(lambda target: fuzz(target, args.time, args.seed), chosen))
    return 0 if all(good) else 1


def make_seeds() -> None:
    """Make the seeds of all targets with the installed library."""
    shutil.rmtree(BUILD / "seeds", ignore_errors=True)
    command = [sys.executable, str(FUZZ / "make_corpus.py"), str(BUILD / "seeds")]
    subprocess.run(command, check=True)


def fuzz(target: Target, seconds: int, seed: int) -> bool:
    """Build and run one target, and print the outcome; returns whether nothing was found."""
    if target.is_python and find_spec("atheris") is None:
        say(f"{target.name}: SKIPPED, because atheris is missing; it runs on Linux on x86-64 only")
        return True
    command = [sys.executable, str(FUZZ / target.source)] if target.is_python else build(target)
    if command is None:
        return False
    found = BUILD / "corpus" / target.name
    found.mkdir(parents=True, exist_ok=True)
    kept = [BUILD / "seeds" / target.seeds, FUZZ / "corpus" / target.seeds]
    folders = (found, *(folder for folder in kept if folder.is_dir()))
    stop = (f"-max_total_time={seconds}", f"-seed={seed}", "-print_final_stats=1")
    prefix = f"-artifact_prefix={BUILD}/{target.name}-"
    arguments = (*stop, prefix, *LIMITS, *target.options, *map(str, folders))
    log = BUILD / f"{target.name}.log"
    with log.open("wb") as output:
        status = subprocess.run([*command, *arguments], stdout=output, stderr=output).returncode
    text = log.read_text(errors="replace")
    if status == 0:
        say(f"{target.name}: {summary(text)}, nothing found")
        return True
    say(f"{target.name}: FINDING, status {status}; the whole log is in {log}", tail(text))
    return False


def build(target: Target) -> list[str] | None:
    """Compile a target unless it was compiled from what the sources are now. Returns its command,
    or None if compiling fails."""
    source, program = ROOT / "fuzz" / target.source, BUILD / target.name
    sources = [source, *source.parent.glob("*.hpp"), *(ROOT / "csrc").rglob("*.hpp")]
    try:
        compile_once([COMPILER, *FLAGS, f"fuzz/{target.source}"], program, sources, ROOT)
    except subprocess.CalledProcessError as error:
        say(f"{target.name}: it does not compile", error.stderr)
        return None
    return [str(program)]


def summary(log: str) -> str:
    """How many inputs a run tried, and how many edges of the control flow they reached."""
    edges = re.findall(r"cov: (\d+)", log) or ["0"]
    runs = re.search(r"number_of_executed_units: *(\d+)", log)
    return f"{runs[1] if runs else '?'} inputs, {edges[-1]} edges"


def tail(log: str) -> str:
    """The end of a log without the lines about progress."""
    lines = [line for line in log.splitlines() if not re.match(r"#\d+\s|INFO: Instr", line)]
    return "\n".join(lines[-TAIL_LINES:])


def say(*lines: str) -> None:
    """Print lines that stay together."""
    with _printing:
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
