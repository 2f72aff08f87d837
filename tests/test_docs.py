"""The documentation of the API: the content of docstrings, their examples, and the site's pages."""

import ast
import builtins
import doctest
import enum
import importlib
import inspect
import pkgutil
import re
import runpy
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
from ml_dtypes import bfloat16
from trainer_samples import make_trainer

import packhorse
from packhorse.disk import pack_file, pack_folder

ERRORS = packhorse.errors.__all__
ROOT = Path(__file__).parent.parent
MODULES = [
    "packhorse",
    "packhorse.numpy",
    "packhorse.torch",
    "packhorse.frame",
    "packhorse.disk",
    "packhorse.disk.dcp",
    "packhorse.device",
    "packhorse.wire",
    "packhorse.wire.bounds",
    "packhorse.wire.embeddings",
    "packhorse.wire.updates",
    "packhorse.h5py",
    "packhorse.learn",
    "packhorse.lightning",
    "packhorse.numcodecs",
    "packhorse.reports.report",
    "packhorse.transformers",
    "packhorse.zarr",
    "packhorse.errors",
]


class Documented(NamedTuple):
    """A public function, class, method or property."""

    name: str
    thing: Any
    owner: type | None

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself, without its wrappers."""
        value = self.thing
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        return inspect.unwrap(value)

    @property
    def doc(self) -> str:
        """The docstring; for a class, together with that of its `__init__`."""
        own = inspect.cleandoc(self.thing.__doc__ or "")
        if inspect.isclass(self.thing) and "__init__" in vars(self.thing):
            own += "\n\n" + inspect.cleandoc(self.thing.__init__.__doc__ or "")
        return own


def things_of(module: str) -> Iterator[Documented]:
    names = importlib.import_module(module)
    for name in names.__all__:
        thing = getattr(names, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield Documented(f"{thing.__module__}.{name}", thing, None)
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_") and is_method(value):
                yield Documented(f"{thing.__module__}.{name}.{member}", value, thing)


def is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


@cache
def everything() -> dict[str, Documented]:
    """All public things, each once."""
    return {item.name: item for module in MODULES for item in things_of(module)}


def sections(doc: str) -> dict[str, str]:
    """The text below each heading of a docstring."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Example):\n", doc, flags=re.M)
    ends = (re.split(r"^(?=\S)", text, maxsplit=1, flags=re.M)[0] for text in parts[2::2])
    return dict(zip(parts[1::2], ends, strict=True))


def entries(text: str) -> list[str]:
    """The names before the colons of a section."""
    heads = re.findall(r"^ {4}(\S[^:]*):\s", text, re.M)
    return [name.strip("* ") for head in heads for name in head.split(",")]


def is_given(thing: object) -> bool:
    """Whether callers never make objects of a class: results, errors, choices, and connections to
    frameworks."""
    return inspect.isclass(thing) and (
        is_record(thing)
        or issubclass(thing, BaseException | enum.Enum)
        or getattr(thing, "_is_protocol", False)
        or thing.__name__.endswith("Framework")
    )


def is_record(thing: type) -> bool:
    return "__dataclass_fields__" in vars(thing) or hasattr(thing, "_fields")


def says_its_class(item: Documented) -> bool:
    """Whether a method is defined by a class of another package, or by a protocol."""
    if item.owner is None:
        return False
    foreign = [base for base in item.owner.__mro__[1:] if base is not object]
    return is_given(item.owner) or any(hasattr(b, item.function.__name__) for b in foreign)


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def wanted_parameters(item: Documented) -> list[str]:
    """The parameters that must be documented; a class whose `__init__` has no docstring is not for
    callers."""
    if isinstance(item.thing, property) or says_its_class(item) or is_given(item.thing):
        return []
    if not inspect.isclass(item.thing):
        return parameters(item.function)
    words = getattr(vars(item.thing).get("__init__"), "__doc__", None) or "Private"
    return [] if words.startswith("Private") else parameters(item.thing.__init__)


def test_parameters_are_documented() -> None:
    """All parameters are documented, in order, and no others."""
    for name, item in everything().items():
        said = entries(sections(item.doc).get("Args", ""))
        function = item.thing.__init__ if inspect.isclass(item.thing) else item.function
        there = parameters(function)
        assert set(said) >= set(wanted_parameters(item)), name
        assert said == [parameter for parameter in there if parameter in said], name


def test_what_is_given_back_is_documented() -> None:
    for name, item in everything().items():
        if inspect.isclass(item.thing) or isinstance(item.thing, property) or says_its_class(item):
            continue
        if inspect.signature(item.function).return_annotation in ("None", None):
            continue
        if parameters(item.function):
            assert {"Returns", "Yields"} & set(sections(item.doc)), name


def test_what_is_raised_is_documented() -> None:
    """Only exceptions that the function itself raises are checked."""
    for name, item in everything().items():
        if inspect.isclass(item.thing):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(item.function)))
        raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        calls = [exc.func for exc in raised if isinstance(exc, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name) and call.id[0].isupper()}
        said = sections(item.doc).get("Raises", "")
        assert {error for error in names if error not in said} == set(), name


def test_errors_that_are_documented_exist() -> None:
    known = vars(builtins) | {error: getattr(packhorse.errors, error) for error in ERRORS}
    for name, item in everything().items():
        for error in entries(sections(item.doc).get("Raises", "")):
            assert issubclass(known[error], BaseException), name


def test_the_errors_are_as_they_are_drawn() -> None:
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+)(?: {2,}\S|$)", packhorse.errors.__doc__ or "", re.M)
    assert {name for _, name in drawn} == set(ERRORS) - {"blaming"}
    above: list[str] = []
    for lines, name in drawn:
        depth = len(lines) // 4
        above[depth:] = [name]
        parent = above[depth - 1] if depth else "Exception"
        assert getattr(packhorse.errors, name).__bases__[0].__name__ == parent


def test_fields_are_documented() -> None:
    for name, item in everything().items():
        if inspect.isclass(item.thing) and is_record(item.thing):
            fields = getattr(item.thing, "_fields", None) or [*item.thing.__dataclass_fields__]
            said = entries(sections(item.doc).get("Attributes", ""))
            assert said == [field for field in fields if not field.startswith("_")], name


# Pages.


def test_every_public_name_is_on_a_page() -> None:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    written = re.findall(r"^::: (\S+)", text, re.M)
    assert len(set(written)) == len(written)
    found = [pkgutil.resolve_name(name) for name in written]
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            thing = getattr(importlib.import_module(module), name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                assert any(thing is other for other in found), f"{module}.{name}"
            else:
                assert f"`{module}.{name}`" in text


# Examples.


EXAMPLES = [name for name, item in everything().items() if ">>>" in item.doc]


def test_verbs_have_an_example() -> None:
    wanted = {
        name
        for name, item in everything().items()
        if item.owner is None and not is_given(item.thing)
    }
    assert wanted - set(EXAMPLES) == set()


def write_files(folder: Path, text: str) -> None:
    """The files that examples find in their folder, under the names that they use."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((512, 64), np.float32)
    for name, tensor in {"model": weight, "tuned": weight * np.float32(1.001)}.items():
        tensors = {"weight": tensor.astype(bfloat16), "bias": tensor[:, 0].copy()}
        safetensors.numpy.save_file(tensors, folder / f"{name}.safetensors")
    pack_file(folder / "model.safetensors", folder / "model.ph.safetensors")
    if "llama" in text:
        make_model = runpy.run_path(str(ROOT / "examples" / "serve_packed.py"))["make_tiny_model"]
        make_model(folder / "llama")
        pack_folder(folder / "llama", folder / "llama.ph")


def names_for(folder: Path, text: str) -> dict[str, object]:
    """The objects that examples take from the program around them: a model, and objects that train
    it."""
    if "Trainer(model" not in text:
        return {}
    trainer = make_trainer(folder / "out", [], max_steps=2, logging_strategy="no")
    return {"model": trainer.model, "args": trainer.args, "data": trainer.train_dataset}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs examples as if they were pasted into an empty program, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    text = sections(everything()[name].doc)["Example"]
    assert "+SKIP" not in text
    write_files(tmp_path, text)
    test = doctest.DocTestParser().get_doctest(text, names_for(tmp_path, text), name, None, None)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)
