"""However a run of the command ends: one line, the documented code, and with --json a document."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_samples import COMMAND, Ended, default_signals, run_command, write_large_model, write_model

from packhorse.arguments import resolve_threads
from packhorse.cli import actions
from packhorse.cli.failures import ExitCode, Stopped

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
    model = write_large_model(tmp_path / "model.safetensors", 1 << 28)
    with subprocess.Popen(
        [COMMAND, "pack", model, "--json", "--threads", "1"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=default_signals,
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


# Ctrl-C before anything has begun


@pytest.mark.parametrize("json_option", [[], ["--json"]], ids=["", "json"])
@pytest.mark.parametrize("module", ["numpy", "rich.console"])
def test_ctrl_c_while_packages_are_imported(tmp_path: Path, module: str, json_option: list[str]):
    """A module that takes long to import asks for the signal at that very moment."""
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


@pytest.mark.parametrize("option", ["", "--json"])
@pytest.mark.parametrize(
    ("where", "words"), [(">&-", "is closed"), ("> /dev/full", "no space left on device")]
)
def test_output_that_goes_nowhere(packed: Path, where: str, words: str, option: str):
    done = sh(f'"$0" inspect "$1" {option} {where}', packed)
    assert done.code == 3
    assert done.error == f"standard output: {words}; print to somewhere else"


def test_nothing_is_printed_where_all_is_closed(model: Path):
    assert sh('"$0" pack "$1" --force >&- 2>&- <&-', model) == Ended(0, "", "")
    assert sh('"$0" inspect "$1" 2>&-', model.with_name("none")) == Ended(3, "", "")
    packed = model.with_name("model.ph.safetensors")
    assert run_command("verify", packed).code == 0  # nothing was printed into it


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_reader_that_has_enough(packed: Path, option: str):
    words = f'"$0" inspect {option} $(yes "$1" | head -300) | head -1; exit ${{PIPESTATUS[0]}}'
    done = sh(words, packed)
    assert done.code == 128 + signal.SIGPIPE
    assert done.err == ""
    assert len(done.out.splitlines()) == 1


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


def test_shells_complete_verbs(monkeypatch: pytest.MonkeyPatch):
    env = {
        "_PACKHORSE_COMPLETE": "complete_bash", "COMP_WORDS": "packhorse snap", "COMP_CWORD": "1"
    }  # fmt: skip
    assert run_command(env={**os.environ, **env}).out.split() == ["snapshot"]
    script = run_command("--show-completion", "bash")
    if script.code != 0:  # the shell is found out, and not named
        script = sh('"$0" --show-completion')
    assert "_PACKHORSE_COMPLETE" in script.out
