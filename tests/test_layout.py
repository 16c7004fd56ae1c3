"""The rooms of the package: who may import whom, what importing costs, and what is shipped."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mla_convert

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FOLDERS = {name: ROOT / folder for name, folder in PYPROJECT["tool"]["setuptools"]["package-dir"].items()}

# From the bottom up. A module of mla_convert that is named nowhere here belongs to the core.
BASE = {"errors", "geometry", "version", "wording"}
ABOVE_PATCHES = {
    "verification",
    "judgement",
    "sizes",
    "stages",
    "subject",
    "trial",
    "benchmark",
    "conversion",
    "calibration",
    "quality",
    "report",
    "demo",
}
TOP = {"cli", "cli_options", "cli_program", "cli_tables", "console", "__main__"}
ROOMS = ["base", "core", "kernels", "patches", "verification", "command line"]


def room(module: str) -> str:
    """The room of a dotted module name inside the package."""
    first = module.split(".")[1]
    if first in ("kernels", "patches"):
        return first
    if first in BASE:
        return "base"
    return "verification" if first in ABOVE_PATCHES else "command line" if first in TOP else "core"


def allowed(importer: str, imported: str) -> bool:
    """Arrows point down; kernels see the base and themselves only."""
    own, other = room(importer), room(imported)
    if own == "kernels":
        return other in ("kernels", "base")
    return ROOMS.index(other) <= ROOMS.index(own)


def modules() -> dict[str, ast.Module]:
    """Every module of the package, by dotted name; the package's own ``__init__`` is looked at apart."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.glob("*.py"):
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            found[name] = ast.parse(path.read_text("utf-8"), path)
    return found


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports below a node; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = modules()
INNER = sorted(name for name in MODULES if name != "mla_convert")


def test_the_walk_sees_the_package() -> None:
    known = {"mla_convert.errors", "mla_convert.kernels.reference", "mla_convert.patches", "mla_convert.cli"}
    assert known <= set(MODULES)


@pytest.mark.parametrize("name", INNER)
def test_arrows_point_down(name: str) -> None:
    ours = [target for target in imported_names(MODULES[name]) if target.startswith("mla_convert.")]
    public = {f"mla_convert.{attribute}" for attribute in mla_convert.__all__}
    upward = [target for target in ours if target not in public and not allowed(name, target)]
    assert not upward, f"{name} ({room(name)}) must not import {upward}"
    if room(name) not in ("verification", "command line"):
        assert not public & set(ours), f"{name} must import from the module, not from the lazy package"


def test_the_rule_of_direction() -> None:
    assert allowed("mla_convert.patches.apply", "mla_convert.kernels.dispatch")
    assert not allowed("mla_convert.kernels.dispatch", "mla_convert.absorption")
    assert not allowed("mla_convert.storage", "mla_convert.kernels.reference")
    assert not allowed("mla_convert.conversion", "mla_convert.cli")


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/*.py")))
def test_no_bare_import_of_the_mapped_folders(name: str) -> None:
    imported = imported_names(ast.parse((ROOT / name).read_text("utf-8")))
    bare = [target for target in imported if target.split(".")[0] in ("kernels", "patches")]
    assert not bare, f"{name} imports {bare}: the names are mla_convert.kernels and mla_convert.patches"


def loaded_by(*names: str) -> set[str]:
    """Top-level modules in a fresh interpreter after importing the named ones."""
    code = f"import {', '.join(names)}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT.anchor, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_package_is_cheap() -> None:
    assert not {"torch", "transformers", "triton", "rich", "typer"} & loaded_by("mla_convert")


def test_the_core_needs_neither_triton_nor_transformers() -> None:
    core = [name for name in INNER if room(name) in ("base", "core")]
    assert not {"triton", "transformers"} & loaded_by(*core)


def test_the_shipped_packages_are_the_folders() -> None:
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted([*FOLDERS, "mla_convert.example"])
    with_code = {path.parent for folder in FOLDERS.values() for path in folder.rglob("*.py")}
    assert with_code == set(FOLDERS.values())
    assert all((folder / "__init__.py").is_file() for folder in FOLDERS.values())


def test_the_installed_package_is_this_checkout() -> None:
    for name, folder in FOLDERS.items():
        found = importlib.import_module(name).__file__
        assert found is not None and Path(found).resolve() == folder / "__init__.py"


def test_the_package_is_typed_and_its_version_is_one() -> None:
    from importlib import metadata

    assert (ROOT / "mla_convert" / "py.typed").is_file()
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mla_convert.version.__version__"}
    assert metadata.version("mla-convert") == mla_convert.__version__
    section = "Unreleased" if ".dev" in mla_convert.__version__ else mla_convert.__version__
    assert f"## [{section}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_public_name_resolves() -> None:
    assert {"MLAGeometry", "__version__", "convert"} <= set(dir(mla_convert))
    for name in mla_convert.__all__:
        assert getattr(mla_convert, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mla_convert.no_such_name


def test_constraints_pin_what_is_asked_for() -> None:
    """Every requirement has one exact pin that satisfies it, by name from the registry, nothing by path or address."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {}
    for line in (line for line in lines if not line.startswith("#")):
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and requirement.url is None, line
        pins[str(canonicalize_name(requirement.name))] = specifier.version
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    for text in PYPROJECT["project"]["dependencies"] + [item for extra in extras for item in extra]:
        asked = Requirement(text)
        assert pins[str(canonicalize_name(asked.name))] in asked.specifier
    assert pins["torch"] == "2.13.0"
