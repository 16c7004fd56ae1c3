"""What is built and shipped: the wheel holds every module and the example, and works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mla_convert

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mla_convert": "mla_convert", "kernels": "mla_convert/kernels", "patches": "mla_convert/patches"}
SOURCES = (*PACKAGES, "cli.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run Python with the arguments; return its standard output."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the source distribution from a copy of the checkout, without network."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    run("-m", "build", "--no-isolation", "--outdir", "dist", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    expected = {"mla_convert/py.typed", "mla_convert/example/config.json"}
    for folder, inside in PACKAGES.items():
        expected |= {f"{inside}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    expected |= {f"mla_convert/example/{path.name}" for path in (ROOT / "mla_convert" / "example").iterdir()}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_the_installed_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    where = "import mla_convert.kernels, mla_convert.patches; print(mla_convert.kernels.__file__)"
    assert run("-c", where, cwd=tmp_path, PYTHONPATH=str(site)).strip() == str(
        site / "mla_convert" / "kernels" / "__init__.py"
    )
    said = run("-m", "mla_convert", "--version", cwd=tmp_path, PYTHONPATH=str(site))
    assert said == f"mla-convert {mla_convert.__version__}\n"


def test_the_example_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "mla_convert" / "example").iterdir()) < 6_000_000
