"""Every run of the command ends with one line and the documented code; with --json, a document."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_samples import COMMAND, Ended, default_signals, run_command, write_large_model, write_model

from packhorse.arguments import resolve_threads
from packhorse.cli import actions
from packhorse.cli.failures import ExitCode, Stopped, is_lack_of_memory

Run = Callable[..., Ended]


def document(done: Ended) -> dict[str, list[dict[str, object]]]:
    found = json.loads(done.out)
    assert set(found) == {"results", "errors"}
    for row in found["errors"]:
        assert set(row) == {"path", "exit_code", "message"}
        assert row["message"] in done.err
    return dict(found)


# JSON


@pytest.mark.parametrize(
    "words",
    [
        ["pack"],
        ["pack", "x", "--colour"],
        ["pack", "x", "--level", "best"],
        ["verify", "x", "--threads", "0"],
        ["frobnicate"],
        [],
        ["snapshot"],
        ["snapshot", "take"],
        ["snapshot", "diff", "store", "a", "b", "--limit", "-1"],
        ["tune", "--shape", "none"],
        ["tune", "--gpu", "H200"],
        ["snapshot", "take", "store", "a", "x", "--metadata", "wrong"],
        ["snapshot", "prune", "store"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_gives_a_document(
    tmp_path: Path, run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = run(*words, "--json")
    (error,) = document(done)["errors"]
    assert (done.code, error["exit_code"]) == (2, 2)
    assert done.error == error["message"]


def test_a_missing_source_gives_a_document(tmp_path: Path, run: Run):
    for verb in ("pack", "verify", "bench"):
        done = run(verb, tmp_path / "nothing.ph.safetensors", "--json")
        (error,) = document(done)["errors"]
        assert (done.code, error["exit_code"]) == (3, 3)
        assert str(tmp_path) in str(error["message"])


def test_a_fault_of_our_own_has_a_code_of_its_own(
    packed: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    def broken(path: Path) -> None:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(actions, "inspect", broken)
    done = run("inspect", packed, "--json")
    (error,) = document(done)["errors"]
    assert (done.code, error["exit_code"]) == (5, ExitCode.BUG)
    words = "a fault of Packhorse itself: ZeroDivisionError: nobody thought of this; please report"
    assert words in done.err.splitlines()[-1]
    assert "Traceback" in done.err
    done = run("inspect", packed)
    assert (done.code, done.out) == (5, "")


def test_what_was_done_before_a_signal_is_in_the_document(
    packed: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    real, calls = actions.inspect, []

    def stopped(path: Path) -> object:
        calls.append(path)
        if len(calls) == 2:
            raise Stopped(signal.SIGTERM)
        return real(path)

    monkeypatch.setattr(actions, "inspect", stopped)
    done = run("inspect", packed, packed, packed, "--json")
    found = document(done)
    assert done.code == 128 + signal.SIGTERM
    assert len(found["results"]) == 1
    assert [error["exit_code"] for error in found["errors"]] == [143]


def test_a_signal_gives_a_document(tmp_path: Path):
    model = write_large_model(tmp_path / "model.safetensors", 1 << 26)
    with subprocess.Popen(
        [COMMAND, "pack", model, "--json", "--threads", "1", "--level", "max"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals,
    ) as process:  # fmt: skip
        while not any(tmp_path.glob(".packhorse-*")):
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    (error,) = document(Ended(process.returncode, out, err))["errors"]
    assert error["exit_code"] == process.returncode == 143


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_gives_a_document(package: str):
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from packhorse.cli import main; sys.exit(main(['pack', 'x', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (error,) = document(Ended(done.returncode, done.stdout, done.stderr))["errors"]
    assert (done.returncode, error["exit_code"]) == (4, 4)


def test_json_behind_two_dashes_is_a_name(tmp_path: Path, run: Run):
    done = run("inspect", "--", "--json")
    assert (done.code, done.out) == (3, "")


def test_help_and_version_stay_text(run: Run):
    assert run("pack", "--help", "--json").out.lstrip().startswith("Usage")
    assert run("--version").out == run("-V").out


# Ctrl-C before any work has started


@pytest.mark.parametrize("json_option", [[], ["--json"]], ids=["", "json"])
@pytest.mark.parametrize("module", ["numpy", "rich.console"])
def test_ctrl_c_while_packages_are_imported(tmp_path: Path, module: str, json_option: list[str]):
    """The signal arrives during the import of a module that takes long."""
    folder = tmp_path.joinpath(*module.split(".")[:-1])
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = run_command(
        "inspect", "x", *json_option, preexec_fn=default_signals,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.code == 130
    assert done.error.startswith("stopped by SIGINT; ")
    if json_option:
        assert document(done)["errors"][0]["exit_code"] == 130


# A signal when the work is done, or nearly


KILL = """
import os, signal, sys
module, function, event, number = os.environ["MOMENT"].split()
def profile(frame, kind, _):
    code = frame.f_code
    if kind == event and code.co_name == function and code.co_filename.endswith(module):
        sys.setprofile(None)
        os.kill(os.getpid(), int(number))
sys.setprofile(profile)
"""
HALF_WAY = "finished output was kept, unfinished output was removed"
MOMENTS = {
    "before the run": ("cli/app.py run call", "no work was started", False),
    "written, and not in its place": ("storage/atomic.py _commit_file call", HALF_WAY, False),
    "in its place": ("storage/atomic.py _commit_file return", HALF_WAY, True),
    "the verb has ended": ("cli/app.py _ended return", "the work was already done", True),
    "all is printed": ("cli/app.py _printed return", "the work was already done", True),
    "the run has ended": ("cli/app.py run return", "", True),
    "the program ends": ("cli/start.py main return", "", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_is_told_of_a_signal_is_true(tmp_path: Path, model: Path, moment: str):
    """The process sends itself the signal when a function is called or returns."""
    where, words, is_there = MOMENTS[moment]
    number = signal.SIGINT if "return" in where else signal.SIGTERM
    (tmp_path / "sitecustomize.py").write_text(KILL)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "MOMENT": f"{where} {number}"}
    done = run_command("pack", model, "--json", preexec_fn=default_signals, env=env)
    assert done.code in (128 + number, -number)
    assert done.err.endswith(f"stopped by {number.name}; {words}\n" if words else "")
    assert model.with_name("model.ph.safetensors").exists() is is_there
    assert not [*tmp_path.glob(".packhorse-*")]
    found = json.loads(done.out)
    assert len(found["results"]) == (words not in ("no work was started", HALF_WAY))
    if moment != "all is printed" and words:
        assert [error["exit_code"] for error in found["errors"]] == [128 + number]


def test_a_signal_while_nobody_reads_on(packed: Path):
    """The pipe is full, and its reader does not read."""
    with subprocess.Popen(
        [COMMAND, "inspect", "--json", *[packed] * 60], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=default_signals,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGTERM)
        assert (
            process.stderr.read()
            == b"packhorse: error: stopped by SIGTERM; the work was already done\n"
        )
        assert process.wait(20) == -signal.SIGTERM


# Memory


def limited(kilobytes: int, *words: object) -> Ended:
    """Run the command with this limit on its address space."""
    return sh(f'ulimit -v {kilobytes}; exec "$0" "$@"', *words)


def test_too_little_memory_to_start(packed: Path):
    """Covers limits from the least with which Python can start to one that allows all imports. Some
    C libraries end the process in that range."""
    words = "not enough memory to start; raise the limit on memory (ulimit -v), or use a machine "
    for kilobytes in (30_000, 60_000, 130_000):
        done = limited(kilobytes, "verify", packed, "--json")
        (error,) = document(done)["errors"]
        assert (done.code, error["exit_code"], error["path"]) == (3, 3, "")
        assert done.error == error["message"] == words + "with more memory"


def test_too_little_memory_to_compile_modules(packed: Path, tmp_path: Path):
    """Python's compiler may replace a MemoryError by another error."""
    words = f'export PYTHONPYCACHEPREFIX={tmp_path}; ulimit -v 150000; exec "$0" "$@"'
    done = sh(words, "verify", packed, "--json")
    (error,) = document(done)["errors"]
    assert (done.code, error["exit_code"]) == (3, 3)
    assert done.error.startswith("not enough memory to start")


def test_memory_that_ends_after_the_start(packed: Path):
    """Memory may run out anywhere. This must be reported, with the file if work on it has begun."""
    for kilobytes in (166_000, 174_000):
        done = limited(kilobytes, "verify", packed, "--json", "-t", 1)
        errors = document(done)["errors"]
        assert done.code == (3 if errors else 0)
        assert all(
            re.match(r"(/.*: )?not enough memory to [a-z ]+; raise ", str(error["message"]))
            for error in errors
        )


def test_the_file_is_named(packed: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    def verify(path: Path, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(actions, "verify_file", verify)
    done = run("verify", packed, "--json")
    (error,) = document(done)["errors"]
    assert (done.code, error["path"]) == (3, str(packed))
    assert done.error.startswith(f"{packed}: not enough memory to go on; raise the limit on memory")
    assert is_lack_of_memory(ssl.SSLError(1, "[CRYPTO] malloc failure (_ssl.c:3098)"))
    assert not is_lack_of_memory(ssl.SSLError(1, "certificate verify failed"))


def test_threads_that_the_system_refuses(packed: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    real, calls = actions.verify_file, []

    def verify(path: Path, **options: object) -> object:
        calls.append(path)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")
        return real(path, **options)

    monkeypatch.setattr(actions, "verify_file", verify)
    done = run("verify", packed, packed, "--json")
    assert (done.code, len(document(done)["results"])) == (3, 1)
    assert done.error.startswith(
        f"{packed}: the system refuses to start a thread; use fewer (-t 1)"
    )


ENDS = {
    "MemoryError": "raise MemoryError",
    "no library": "raise ImportError('libx.so: failed to map segment from shared object')",
    "numpy": "raise ImportError('see') from ImportError('libx.so: cannot allocate memory')",
    "after another": "try: raise MemoryError\nexcept MemoryError: raise AttributeError('x')",
    "lost": "raise SystemError('<built-in f> returned NULL without setting an exception')",
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_that_ends_in_an_import(tmp_path: Path, end: str):
    (tmp_path / "numpy.py").write_text(ENDS[end])
    done = run_command("inspect", "x", "--json", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.code == 3
    assert done.error.startswith("not enough memory to start; ")
    assert document(done)["errors"][0]["exit_code"] == 3


def test_an_import_that_fails_for_another_reason_is_no_lack_of_memory(tmp_path: Path):
    (tmp_path / "numpy.py").write_text(
        "raise ImportError('cannot allocate memory in static TLS block')"
    )
    done = run_command("inspect", "x", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.code == 1
    assert "Traceback" in done.err


# Threads


def test_any_number_of_threads_will_do(model: Path, packed: Path, run: Run):
    for n in (10**9, 10**30):
        assert resolve_threads(n) == 1024
        assert run("pack", model, "--force", "-t", n).code == 0
        assert run("verify", packed, "-t", n).code == 0
        assert run("unpack", packed, "--force", "-t", n).code == 0
        (row,) = json.loads(run("bench", model, "-r", 1, "-t", n, "--json").out)["results"]
        assert row["threads"] == 1024


# Standard output


def sh(words: str, *args: object, **env: str) -> Ended:
    """Run a line of the shell, in which "$0" is the command."""
    done = subprocess.run(
        ["bash", "-c", words, COMMAND, *map(str, args)], capture_output=True, text=True,
        timeout=60, env={**os.environ, **env},
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("words", ["inspect X", "inspect X --json", "-V", "pack --help"])
@pytest.mark.parametrize(
    ("where", "told"), [(">&-", " is closed"), ("> /dev/full", ": no space left on device")]
)
def test_output_that_goes_nowhere(packed: Path, where: str, told: str, words: str):
    done = sh(f'"$0" {words.replace("X", str(packed))} {where}')
    assert done.code == 3
    assert done.error == f"standard output{told}; write it elsewhere"


def test_errors_that_go_nowhere(packed: Path):
    for words, code in (("pack --colour", 2), ("verify none", 3), (f"verify {packed}", 0)):
        done = sh(f'"$0" {words} 2> /dev/full')
        assert (done.code, done.err, bool(done.out)) == (code, "", code == 0)


def test_nothing_is_printed_where_all_is_closed(model: Path):
    assert sh('"$0" pack "$1" --force >&- 2>&- <&-', model) == Ended(0, "", "")
    assert sh('"$0" inspect "$1" 2>&-', model.with_name("none")) == Ended(3, "", "")
    packed = model.with_name("model.ph.safetensors")
    assert run_command("verify", packed).code == 0  # the output was not printed to it


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_reader_that_has_enough(packed: Path, option: str):
    words = f'"$0" inspect {option} $(yes "$1" | head -300) | head -1; exit ${{PIPESTATUS[0]}}'
    done = sh(words, packed)
    assert done.code == 128 + signal.SIGPIPE
    assert done.err == ""
    assert len(done.out.splitlines()) == 1


@pytest.mark.parametrize("words", ["-V", "--help", "snapshot"])
def test_nobody_reads_at_all(packed: Path, words: str):
    """The reader of the pipe exits before anything is printed."""
    ours, theirs = os.pipe()
    os.close(ours)
    options = {"stdout": theirs, "stderr": subprocess.PIPE, "preexec_fn": default_signals}
    words = words.replace("X", str(packed))
    done = subprocess.run([COMMAND, *words.split()], **options)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_output_of_ascii(tmp_path: Path, run: Run):
    model = write_model(tmp_path / "modèle-β.safetensors")
    assert run("pack", model).code == 0
    for i in range(2):
        assert run("snapshot", "take", tmp_path / "s", f"β{i}", model).code == 0
    packed = tmp_path / "modèle-β.ph.safetensors"
    inspected = sh('"$0" inspect "$1"', packed, PYTHONIOENCODING="ascii")
    assert r"mod\xe8le-\u03b2" in inspected.out
    assert re.search(r"=+#+\.+  exponent rans", inspected.out)
    shown = sh('"$0" snapshot show "$1"', tmp_path / "s", PYTHONIOENCODING="ascii")
    assert "##" in shown.out
    helped = sh('"$0" pack --help', PYTHONIOENCODING="ascii")
    for done in (inspected, shown, helped):
        assert (done.code, done.err) == (0, "")
        assert done.out.isascii()
    assert sh('"$0" inspect "$1"', packed, LC_ALL="C", PYTHONUTF8="0").code == 0


def test_streams_of_the_caller_are_as_before(run: Run):
    before = sys.stdout.errors, sys.stderr.errors, signal.getsignal(signal.SIGPIPE)
    assert run("-V").code == 0
    assert before == (sys.stdout.errors, sys.stderr.errors, signal.getsignal(signal.SIGPIPE))


# Help


def helps(run: Run) -> dict[str, str]:
    verbs = ["", "pack", "unpack", "inspect", "verify", "bench", "tune", "snapshot"]
    below = ["take", "list", "show", "diff", "restore", "verify", "delete", "prune"]
    words = [[verb] if verb else [] for verb in verbs] + [["snapshot", verb] for verb in below]
    return {" ".join(word): run(*word, "--help").out for word in words}


def test_help_shows_words_for_types(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    for verb, text in helps(run).items():
        for odd in ("<", ">=0", "list[", "bool", " | None", "Union", "Optional", "Annotated"):
            assert odd not in text.replace("[x>=0]", "").replace("->", ""), (verb, odd)
        assert all(len(line) <= 80 for line in text.splitlines())
    assert re.search(r"--threads +-t +INTEGER ", helps(run)["pack"])
    assert re.search(r"--level +-l +fast\|default\|max ", helps(run)["pack"])
    assert re.search(r"SRC +PATH +Safetensors", helps(run)["pack"])


USAGES = {
    "pack": "SRC...", "unpack": "SRC...", "inspect": "SRC...", "verify": "SRC...", "bench": "FILE",
    "tune": "[SRC]...", "snapshot take": "STORE NAME FILE...", "snapshot list": "STORE",
    "snapshot show": "STORE [NAME]", "snapshot diff": "STORE A B", "snapshot restore": "STORE NAME",
    "snapshot verify": "STORE [NAME]...", "snapshot delete": "STORE NAME...",
    "snapshot prune": "STORE",
}  # fmt: skip


def test_help_names_arguments_as_they_are(run: Run):
    """A help text that mentions SRC belongs to a verb that has a SRC."""
    for verb, text in helps(run).items():
        if verb not in USAGES:
            continue
        words = " ".join(text.split())
        assert f"Usage: packhorse {verb} [OPTIONS] {USAGES[verb]} " in words
        names = set(re.findall(r"\b(?:SRC|FILE|STORE|NAME)\b", USAGES[verb]))
        options = text.partition("─ Options")[2]
        said = set(re.findall(r"\b(?:SRC|FILE|STORE|NAME)\b", options.replace("|NAME", "")))
        assert said <= names, verb


def test_shells_complete_verbs(monkeypatch: pytest.MonkeyPatch):
    env = {
        "_PACKHORSE_COMPLETE": "complete_bash", "COMP_WORDS": "packhorse snap", "COMP_CWORD": "1"
    }  # fmt: skip
    assert run_command(env={**os.environ, **env}).out.split() == ["snapshot"]
    script = run_command("--show-completion", "bash")
    if script.code != 0:  # the shell is found out, and not named
        script = sh('"$0" --show-completion')
    assert "_PACKHORSE_COMPLETE" in script.out
