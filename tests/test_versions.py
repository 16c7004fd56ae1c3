"""Which releases of transformers are taken, and that the pins of the oldest one are what is promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import family_models
import models
import pytest

import mla_convert
from mla_convert.errors import PatchError
from mla_convert.patches import versions

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("version", ["4.57.6", "5.15.1", "6.0.0", "6.0.0.dev0", "10.2", "unknown"])
def test_other_releases_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is changed, with what to install."""
    model = models.deepseek_v3()
    monkeypatch.setattr(versions.transformers, "__version__", version)
    with pytest.raises(PatchError, match=f'transformers {version} is installed; .*pip install "transformers>=5.16,<6"'):
        mla_convert.patch(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_release_that_lacks_what_is_imported(tmp_path: Path) -> None:
    """Nothing of an old transformers is touched before its version is."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text('__version__ = "4.46.0"\n')
    code = (
        "import mla_convert, mla_convert.errors\n"
        "try: mla_convert.patch(None)\n"
        "except mla_convert.errors.PatchError as error: print(error)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("transformers 4.46.0 is installed; supported are 5.16 and later 5.x: pip install")


def test_sparse_attention_needs_a_later_release(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = family_models.make("glm_moe_dsa"), models.deepseek_v3()
    for version, fine in (("5.16.0", False), ("5.23.2", False), ("5.24.0", True)):
        monkeypatch.setattr(versions.transformers, "__version__", version)
        with mla_convert.patched(plain):
            pass
        if fine:
            mla_convert.patch(model)
        else:
            with pytest.raises(
                PatchError, match=f'{version} is installed, whose sparse .*install "transformers>=5.24,<6"'
            ):
                mla_convert.patch(model)


@pytest.mark.parametrize("version", ["5.16.0", "5.16.1", "5.24.0", "5.30.0.dev0", "5.100.2"])
def test_releases_that_are_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", version)
    versions.check_transformers()


def test_the_oldest_release_is_the_one_that_is_tested() -> None:
    """``make test-oldest`` installs it, and nothing twice."""
    pins = (ROOT / "constraints-oldest.txt").read_text("utf-8").splitlines()
    names = {line.split("==")[0] for line in pins if not line.startswith("#")}
    assert f"transformers=={'.'.join(map(str, versions.OLDEST))}.0" in pins
    shown = subprocess.run(
        ["make", "--dry-run", "test-oldest", "OLDEST=no-such-folder"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(f"-e '^{name}=='" in shown for name in names)
    assert "no-such-folder/bin/python tools/test_oldest.py" in shown
