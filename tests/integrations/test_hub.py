"""Packed models on a hub: the real client of Hugging Face uploads and downloads them, and the code
of docs/arrays.md runs as it is printed."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

from entry_points import environment_of
from hub_server import running_hub

ROOT = Path(__file__).parents[2]

# The client reads the address of the hub once, when it is imported.
SCRIPT = """
import json, sys, torch
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoModelForCausalLM, LlamaForCausalLM
import packhorse, packhorse.disk
from packhorse.transformers import PackhorseConfig, load_packed_model

plain = LlamaForCausalLM.from_pretrained("llama", dtype="auto")
said = {}

def note(name, model):
    ids = torch.arange(20)[None]
    n_packed = len(model.hf_quantizer.report.packed) if hasattr(model, "hf_quantizer") else 0
    said[name] = [torch.equal(model(ids).logits, plain(ids).logits), n_packed, model.name_or_path]

page = {}  # the names of docs/arrays.md
for block in json.loads(sys.argv[1]):
    exec(block, page)
said["page"] = [bool((page["rows"] == page["weights"][100:110]).all())]
for name in ("array", "old", "back"):
    said["page"].append(bool((page[name][...] == page["weights"]).all()))
note("page's model", page["model"])

packhorse.disk.pack_folder("llama", "llama.ph")
HfApi().create_repo("user/llama")
for words in ("one", "two"):
    Path("llama.ph/README.md").write_text(words)
    done = HfApi().upload_folder(repo_id="user/llama", folder_path="llama.ph")
note("plain", load_packed_model("user/llama"))
note("packed", load_packed_model("user/llama", quantization_config=PackhorseConfig()))
note("revision", load_packed_model("user/llama", revision=done.oid))
packhorse.disk.unpack_folder(snapshot_download("user/llama"), "back")
path = hf_hub_download("user/llama", "model.ph.safetensors")
said["tensors"] = len(packhorse.open_file(path).keys())

model = AutoModelForCausalLM.from_pretrained(
    "llama", dtype="auto", quantization_config=PackhorseConfig()
)
model.push_to_hub("user/packed")
note("pushed", AutoModelForCausalLM.from_pretrained("user/packed", dtype="auto"))
wrong = {"user/nobody": RepositoryNotFoundError, "../nobody": FileNotFoundError}
for name, error in wrong.items():
    try:
        load_packed_model(name)
    except error as problem:
        said[name] = str(problem)
print(json.dumps(said))
"""


def test_packed_models_go_to_a_hub_and_come_back(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "examples" / "serve_packed.py"))["make_tiny_model"](
        tmp_path / "llama"
    )
    with running_hub() as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x"}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        page = (ROOT / "docs" / "arrays.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(blocks)],
            env=environment_of(tmp_path / "installed") | settings, cwd=tmp_path, timeout=240,
            capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(blocks) == 4
    assert all(said["page"])
    assert said["page's model"] == [True, 0, "user/llama-packed"]
    assert said["plain"] == said["revision"] == [True, 0, "user/llama"]
    assert said["packed"] == [True, 16, "user/llama"]
    assert said["pushed"] == [True, 16, "user/packed"]
    assert said["tensors"] == 21
    assert {"user/nobody", "../nobody"} <= said.keys()
    files = [tmp_path / place / "model.safetensors" for place in ("back", "llama")]
    assert files[0].read_bytes() == files[1].read_bytes()

    repo, pushed = hub.repos["user/llama"], hub.repos["user/packed"].commits[-1][1]
    assert len(repo.commits) == 3
    assert hub.uploaded == [
        repo.commits[-1][1]["model.ph.safetensors"],
        pushed["model.safetensors"],
    ]
    config = json.loads(pushed["config.json"])
    assert config["quantization_config"]["quant_method"] == "packhorse"
