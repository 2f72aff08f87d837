"""Packed weights of earlier releases (docs/format.md, section 12), which every later release must
read. Golden files are never edited.

`golden/weights/` has a file of matrices for each format, laid out as the state dict of a packed
model, and a whole small model as `save_pretrained` writes it. Those called `named` have the high
bits under the name of the weight, as state dicts have now; the others are older, and have them as
`high_bits`. `manifest.json` has the SHA-256 of each file, and of the BF16 elements of each weight
in it. The output of an encoder is defined to the bit, so packing the elements again must give the
same arrays. After adding a case, write the missing files with

    PYTHONPATH=tests/samples python tests/codecs/test_golden_weights.py --write-missing

which never touches an existing file, and refuses to write for an older version of the format.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from codec_battery import ISAS, forced
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from weight_samples import MATRICES, model_rows

from packhorse.codecs import weights
from packhorse.layout import WEIGHT_FORMATS, WEIGHT_VERSION, WeightFormat
from packhorse.reference.weights import WeightArrays, decode_weights, encode_weights

FOLDER = Path(__file__).parents[1] / "golden" / "weights"
MANIFEST = FOLDER / "manifest.json"
VERSION = 1  # of weights in memory; a new one gets cases of its own, beside these
DESCRIPTION = "packhorse.weights"  # the pair of metadata that names the packed weights of a file

CASES = {
    "specials": MATRICES["specials"],
    "ends": MATRICES["ends of the exponents"],
    "zeros": MATRICES["zeros"],
    "empty": MATRICES["no rows"],
    "element": MATRICES["one element"],
    "column": lambda: MATRICES["one column"]()[:37],
    "row": lambda: model_rows(1, 3001),
    "narrow": lambda: model_rows(5, 33),
    "noise": lambda: MATRICES["any patterns, odd rows"]()[:6],
}
OTHER_WINDOWS = "other windows"  # valid, though not those that the encoder chooses
FILES = {"W12.safetensors": "W12", "W11.safetensors": "W11", "W12-named.safetensors": "W12"}
MODELS = ("model", "model-named")
MODEL_FILES = [f"{model}/model.safetensors" for model in MODELS]
FORMER_KEY = "high_bits"

Elements = NDArray[np.uint16]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def elements_with_other_windows() -> Elements:
    return model_rows(4, 150)


def encode_cases(format: WeightFormat) -> dict[str, WeightArrays]:
    packed = {name: encode_weights(make(), format) for name, make in CASES.items()}
    firsts = iter((format.min_first, format.max_first, 109, 117))
    with patch("packhorse.reference.weights._choose_first", lambda *_: next(firsts)):
        packed[OTHER_WINDOWS] = encode_weights(elements_with_other_windows(), format)
    return packed


def write_file(path: Path, format: WeightFormat) -> None:
    """As `save_file(model.state_dict(), path, describe_weights(model))` would for such a model."""
    tensors, described = {}, {}
    columns = {name: make().shape[1] for name, make in CASES.items()}
    columns[OTHER_WINDOWS] = elements_with_other_windows().shape[1]
    for name, arrays in encode_cases(format).items():
        weight = f"{name}.weight"
        described[weight] = {"form": format.name, "n_columns": columns[name]}
        fields = arrays._asdict()
        tensors[weight] = fields.pop("high_bits")[..., None]
        tensors |= {f"{weight}.{field}": array for field, array in fields.items()}
    record = json.dumps({"version": VERSION, "weights": described})
    save_file(tensors, path, {DESCRIPTION: record})


def write_model(folder: Path) -> None:
    """A Llama of 20,000 weights with tied embeddings, one layer of it plain."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from packhorse.transformers import PackhorseConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 150}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
    with torch.no_grad():
        query = plain.model.layers[0].self_attn.q_proj.weight
        query[0, :5] = torch.tensor([0.0, -0.0, 1e-40, -1e-30, 1e4])
    plain.save_pretrained(folder)
    config = PackhorseConfig(modules_to_not_convert=["down_proj"])
    packed = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config
    )
    packed.save_pretrained(folder)


def weights_of(path: Path) -> Iterator[tuple[str, WeightFormat, WeightArrays, int]]:
    """Name, format, arrays and columns of each packed weight of a file, read without our code."""
    with safe_open(path, "numpy") as file:
        record = (file.metadata() or {}).get(DESCRIPTION)
        described = json.loads(record)["weights"] if record else described_by_model(path.parent)
        for name, said in described.items():
            fields = {field: f"{name}.{field}" for field in WeightArrays._fields}
            is_former = fields[FORMER_KEY] in file.keys()  # noqa: SIM118
            if not is_former:
                fields[FORMER_KEY] = name
            arrays = {field: file.get_tensor(key) for field, key in fields.items()}
            if not is_former:
                arrays[FORMER_KEY] = np.ascontiguousarray(arrays[FORMER_KEY][..., 0])
            yield name, WEIGHT_FORMATS[said["form"]], WeightArrays(**arrays), said["n_columns"]


def described_by_model(folder: Path) -> dict[str, dict[str, Any]]:
    """A model's file does not contain the number of columns; the model's config does."""
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["version"] == VERSION
    with safe_open(folder / "model.safetensors", "numpy") as file:
        fields = [name for name in file.keys() if name.endswith(".low_bytes")]  # noqa: SIM118
    names = [name.removesuffix(".low_bytes") for name in fields]
    return {name: {"form": "W12", "n_columns": config["hidden_size"]} for name in names}


def describe(path: Path) -> dict[str, dict[str, Any]]:
    """The manifest's lines on the weights of a file, by the slow decoder."""
    lines = {}
    for name, format, arrays, n_columns in weights_of(path):
        elements = decode_weights(arrays, format, n_columns)
        lines[name] = {
            "form": format.name,
            "shape": list(elements.shape),
            "n_exceptions": arrays.exceptions.size,
            "decoded_sha256": sha256(elements.tobytes()),
        }
    return lines


def read_manifest() -> dict[str, Any]:
    return json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {"files": {}, "weights": {}}


def write_missing() -> list[str]:
    """Write missing files, and return their names."""
    if WEIGHT_VERSION != VERSION:
        raise SystemExit(f"these cases are of version {VERSION}; add new ones for {WEIGHT_VERSION}")
    FOLDER.mkdir(exist_ok=True)
    manifest, written = read_manifest(), []
    for name, format in FILES.items():
        if name not in manifest["files"] and not (FOLDER / name).exists():
            write_file(FOLDER / name, WEIGHT_FORMATS[format])
            written.append(name)
    for model, file in zip(MODELS, MODEL_FILES, strict=True):
        if file not in manifest["files"] and not (FOLDER / model).exists():
            write_model(FOLDER / model)
            written += [f"{model}/{path.name}" for path in sorted((FOLDER / model).iterdir())]
    for name in written:
        manifest["files"][name] = sha256((FOLDER / name).read_bytes())
        if name.endswith(".safetensors"):
            manifest["weights"][name] = describe(FOLDER / name)
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return written


GOLDEN = read_manifest()
WEIGHTS = GOLDEN["weights"]
EACH_FILE = pytest.mark.parametrize("name", WEIGHTS)


def test_no_golden_file_is_missing_changed_or_unknown() -> None:
    files = {path for path in FOLDER.rglob("*") if path.is_file()}
    found = {str(path.relative_to(FOLDER)) for path in files}
    assert found == {*GOLDEN["files"], MANIFEST.name}, "see the first lines of this file"
    assert {*FILES, *MODEL_FILES} <= found, "write the missing ones as this file's first lines say"
    for name, digest in GOLDEN["files"].items():
        assert sha256((FOLDER / name).read_bytes()) == digest, f"{name} was edited"
    assert sum(path.stat().st_size for path in files) < 1 << 18


def test_golden_weights_cover_the_format() -> None:
    for file, format in FILES.items():
        assert {f"{name}.weight" for name in (*CASES, OTHER_WINDOWS)} <= {*WEIGHTS[file]}
        kinds = set()
        for _, _, arrays, _ in weights_of(FOLDER / file):
            kinds |= {kind_of(int(e) >> 16) for e in arrays.exceptions.view(np.uint32)}
        zeros = set() if format == "W12" else {"zero", "negative zero"}
        assert kinds == zeros | {"subnormal", "infinity", "NaN", "normal"}


def kind_of(element: int) -> str:
    exponent, mantissa = element >> 7 & 0xFF, element & 0x7F
    if exponent == 255:
        return "NaN" if mantissa else "infinity"
    if exponent:
        return "normal"
    return "subnormal" if mantissa else "negative zero" if element else "zero"


@EACH_FILE
def test_golden_weights_decode_in_every_decoder(name: str) -> None:
    assert describe(FOLDER / name) == WEIGHTS[name]
    for weight, format, arrays, n_columns in weights_of(FOLDER / name):
        held = weights.WeightArrays(*arrays)
        for isa in ISAS:
            with forced(isa):
                weights.check(held, format, n_columns)
                elements = np.full(WEIGHTS[name][weight]["shape"], 0xA5A5, np.uint16)
                weights.unpack_into(held, format, n_columns, elements)
            assert sha256(elements.tobytes()) == WEIGHTS[name][weight]["decoded_sha256"], weight


@EACH_FILE
def test_todays_encoders_write_the_same_arrays(name: str) -> None:
    for weight, format, arrays, n_columns in weights_of(FOLDER / name):
        elements = decode_weights(arrays, format, n_columns)
        packed = [encode_weights(elements, format)]
        for isa in ISAS:
            with forced(isa):
                packed.append(WeightArrays(*weights.pack(elements, format)))
        if OTHER_WINDOWS in weight:
            assert all(sha256(each[2].tobytes()) != sha256(arrays[2].tobytes()) for each in packed)
            continue
        for again in packed:
            for field, ours, golden in zip(WeightArrays._fields, again, arrays, strict=True):
                assert ours.dtype == golden.dtype
                np.testing.assert_array_equal(ours, golden, err_msg=f"{weight}.{field}")


@pytest.mark.parametrize("name", FILES)
def test_golden_files_load_as_packed_layers(name: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from packhorse.device import PackedLinear, join_weights

    tensors = load_file(FOLDER / name)
    with safe_open(FOLDER / name, "pt") as file:
        joined = join_weights(tensors, file.metadata())
    assert set(joined) == set(WEIGHTS[name])
    for weight, line in WEIGHTS[name].items():
        n_rows, n_columns = line["shape"]
        layer = PackedLinear.empty(n_columns, n_rows, bias=False)
        stored = {key for key in tensors if key == weight or key.startswith(f"{weight}.")}
        assert len(stored) == len(WeightArrays._fields)
        own = weight.removesuffix("weight")
        layer.load_state_dict({key.removeprefix(own): tensors[key] for key in stored})
        for held in (joined[weight], layer.weight):
            assert held.format.name == line["form"]
            plain = held.unpack().view(torch.uint16).numpy()
            assert sha256(plain.tobytes()) == line["decoded_sha256"], weight


@pytest.mark.parametrize("name", MODELS)
def test_golden_models_load_in_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import packhorse.transformers  # noqa: F401  (registers the method)

    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name)
    lines = WEIGHTS[f"{name}/model.safetensors"]
    report = model.hf_quantizer.report
    assert len(report.packed) == len(lines)
    assert [left.name for left in report.left] == ["model.layers.0.mlp.down_proj"]
    ids = torch.arange(12)[None]
    logits = model(ids).logits
    model = model.dequantize()
    assert torch.equal(model(ids).logits, logits)
    for weight, line in lines.items():
        plain = model.get_parameter(weight).detach().view(torch.uint16).numpy()
        assert sha256(plain.tobytes()) == line["decoded_sha256"], weight


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the golden files that are missing.")
    parser.add_argument("--write-missing", action="store_true", required=True)
    parser.parse_args()
    print("\n".join(write_missing()) or "nothing is missing")
