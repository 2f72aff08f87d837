"""Checkpoints on S3: s3fs with an S3 server in another process."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dcp_ranks import digest, failing
from dcp_samples import blank, load, save, weights

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is "),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """The URL of the server, which has an empty bucket."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/bucket", timeout=1)
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                time.sleep(0.1)
        request = urllib.request.Request(f"{url}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=5).close()
        yield {"endpoint_url": url, "key": "x", "secret": "x"}
    finally:
        server.kill()
        server.wait()


def test_checkpoints_on_s3(options: dict[str, Any]) -> None:
    """A checkpoint is saved, used as a base, replaced, read in part, and refused when damaged."""
    state = {"w": weights(1500, 400), "v": weights(9), "n": 3}
    save(state, "s3://bucket/run/0", storage_options=options)
    moved = {**state, "v": weights(9, seed=1)}
    save(moved, "s3://bucket/run/1", base="s3://bucket/run/0", storage_options=options)
    for name, expected in (("0", state), ("1", moved)):
        found = blank(expected)
        load(found, f"s3://bucket/run/{name}", storage_options=options)
        assert digest(found) == digest(expected)
    with failing() as errors:
        save(state, "s3://bucket/run/0", storage_options=options)
    assert "overwrite=True" in errors[0]
    save(moved, "s3://bucket/run/1", storage_options=options, overwrite=True)

    import s3fs

    fs = s3fs.S3FileSystem(**options)
    fs.invalidate_cache()
    names = [path.rpartition("/")[2] for path in fs.ls("bucket/run/1")]
    assert len(names) == 2
    part = {"v": torch.zeros(9)}
    assert load(part, "s3://bucket/run/1", storage_options=options).stats.n_frames == 1
    assert torch.equal(part["v"], moved["v"])
    (pack,) = [name for name in names if name.startswith("shards-")]
    data = fs.cat_file(f"bucket/run/1/{pack}")
    fs.pipe_file(f"bucket/run/1/{pack}", data[:-1])
    with failing() as errors:
        load(blank(moved), "s3://bucket/run/1", storage_options=options)
    assert "TruncationError" in errors[0]
