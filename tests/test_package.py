"""The package as a whole: what importing it costs, what it offers, what a wheel of it holds."""

import inspect
import re
import runpy
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

import attnflow as af
from attnflow.masks.registry import named_masks

ROOT = Path(__file__).parent.parent
HEAVY = [
    *("transformers", "huggingface_hub", "accelerate", "matplotlib", "gguf", "pytest"),
    *("lancedb", "pyarrow", "pandas", "datasets"),
    *("torch._dynamo", "torch._inductor"),
]
ROOMS = [
    *(af.models, af.masks, af.order, af.audit, af.tasks, af.bias, af.geometry, af.knowledge, af.explain, af.report),
    af.testing,
]


def python(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_attnflow_imports_nothing_heavy():
    code = (
        f"import torch, sys; before = set(sys.modules); import attnflow; new = set(sys.modules) - before; "
        f"print([name for name in {HEAVY!r} if name in new])"
    )
    assert python(code).strip() == "[]"


def test_drawing_masks_waits_for_no_compiler_no_models_and_no_graphs():
    """The process of each page of the studio, and the commands about masks, begin with these."""
    late = {"torch._dynamo", "transformers", "networkx"}
    code = f"import sys, attnflow.report.live.session; print({late!r} & set(sys.modules))"
    assert python(code).strip() == "set()"


def test_every_public_name_exists_and_completion_shows_no_other():
    for module in (af, *ROOMS):
        assert len(set(module.__all__)) == len(module.__all__)
        assert sorted(dir(module)) == sorted(module.__all__), module.__name__
        for name in module.__all__:
            assert getattr(module, name) is not None


@pytest.mark.slow
def test_no_file_hides_a_public_name():
    """A submodule `trace.py` would take the place of a function `trace` that is bound on use, once it is imported."""
    code = """
import importlib, pkgutil
import attnflow
rooms = ["models", "masks", "order", "audit", "tasks", "bias", "geometry", "knowledge", "explain", "report"]
modules = {name: getattr(attnflow, name) for name in rooms}
public = {(room, name): getattr(module, name) for room, module in modules.items() for name in module.__all__}
for info in pkgutil.walk_packages(attnflow.__path__, "attnflow."):
    if info.name not in ("attnflow.__main__", "attnflow.bias.pairs"):  # the second imports Triton
        importlib.import_module(info.name)
print([f"{room}.{name}" for (room, name), value in public.items() if getattr(modules[room], name) is not value])
"""
    assert python(code).strip() == "[]"


def test_there_are_not_too_many_public_names():
    """A name that no guide, example or test of a user's needs is not public; masks of the catalogue do not count."""
    names = {f"{room.__name__}.{name}" for room in ROOMS if room is not af.testing for name in room.__all__}
    assert len(names - {f"attnflow.masks.{name}" for name in named_masks()}) <= 104


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__.rpartition(".")[2])
def test_public_names_and_their_methods_are_documented(room):
    """Internal names speak for themselves (ruff's D1 is off); public ones are explained."""
    explained = {}
    for name in room.__all__:
        value = getattr(room, name)
        explained |= {name: value} if callable(value) else {}
        members = vars(value) if inspect.isclass(value) else {}
        explained |= {
            f"{name}.{key}": getattr(value, key) for key, member in members.items() if _is_method(key, member)
        }
    assert [name for name, value in explained.items() if not inspect.getdoc(value)] == []


def _is_method(name, member):
    return not name.startswith("_") and isinstance(member, property | classmethod | staticmethod | types.FunctionType)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'mask'"):
        af.mask  # noqa: B018


def test_the_version_is_that_of_the_changelog():
    assert re.search(rf"^## \[?{re.escape(af.__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_errors_of_the_domain_share_a_base():
    for error in (af.LeakFound, af.UnsupportedArchitecture, af.MissingExtra):
        assert issubclass(error, af.AttnflowError)
    assert af.LeakFound("leak", witness=[1, 2]).witness == (1, 2)


def test_every_dependency_of_the_project_is_pinned_for_its_checks():
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split() if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {re.split(r"[\[>=<]", requirement)[0].lower() for requirement in wanted} - {"attnflow"}
    assert names <= pinned
    # A CUDA build of torch names the exact versions that it needs: a pin of our own makes `make demo` unresolvable.
    assert not {name for name in pinned if name == "triton" or name.startswith(("nvidia-", "nvidia_", "cuda-"))}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
RELATIVE = re.compile(r"""\]\((?!https?:|#|mailto:)([^)\s]+)\)""")


def on_pypi(address):
    """The README as the build makes it, with an address in the one place for it."""
    text = (ROOT / "README.md").read_text() + README["fragments"][1]["text"].replace(" -->", f" {address} -->")
    for each in README["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_links_of_the_readme_are_absolute_on_pypi_once_there_is_an_address():
    plain, made = on_pypi(""), on_pypi("https://github.com/o/r")
    links = RELATIVE.findall(plain)
    assert links, "the README has relative links, which stay as they are without an address"
    assert plain.startswith((ROOT / "README.md").read_text())
    assert RELATIVE.findall(made) == []
    assert all(f"](https://github.com/o/r/blob/main/{link})" in made or f"/raw/main/{link})" in made for link in links)
    assert re.findall(r"!\[[^]]*\]\((?!https://github.com/o/r/raw/main/)", made) == []


def test_the_address_stands_in_both_lines_or_in_none():
    (named,) = re.findall(r"<!-- source: *(\S*) *-->", README["fragments"][1]["text"])
    assert PROJECT["project"]["urls"].get("Source", "") == named


def test_no_file_that_runs_has_a_placeholder_for_an_owner():
    runs = [*(ROOT / ".github").rglob("*.yml"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    runs += [ROOT / name for name in ("pyproject.toml", "Makefile", "mkdocs.yml", "README.md", ".ci/run")]
    assert [str(file) for file in runs if re.search(r"\bOWNER\b", file.read_text())] == []


def test_the_extras_have_a_purpose_each():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {"hf", "knowledge", "report", "studio", "trl", "test"}
    assert set(extras) == wanted | {"all", "study", "dev"}
    assert extras["all"] == ["attnflow[hf,knowledge,report,studio,test]"]
    smoke = runpy.run_path(str(ROOT / "tests" / "release_smoke.py"))["SMOKE"]
    assert set(smoke) == wanted | {"light", "all"}


def test_tools_and_citation_have_the_versions_of_the_project():
    ruff = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert ruff is not None
    assert f"rev: v{ruff[1]}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"\nversion: {af.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_it_imports_where_there_is_no_fcntl():
    """As on Windows: a store on disk cannot be opened for writing there, and says so."""
    code = """
import sys
sys.modules["fcntl"] = None
import attnflow as af
try:
    af.knowledge.Store.open("store", dim=2)
except af.AttnflowError as error:
    print(error)
"""
    assert "stores on disk are written on Linux and macOS only" in python(code)


def test_a_wheel_holds_the_whole_package_and_its_data(tmp_path):
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, "."]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("attnflow-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = [p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert {p.relative_to(ROOT / "src").as_posix() for p in sources} <= inside
    assert "attnflow/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
