"""The wheel: both packages, the files that are no Python, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ASSETS = ("model_repo/1/model.py", "loadtest/locustfile.py", "loadtest/workloads/demo.yaml", "build/recipes")


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as an installation has them."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_holds_the_two_packages_and_no_more(installed: Path) -> None:
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"lowkv", "kvattention"}
    assert (installed / "lowkv" / "py.typed").is_file()


def test_an_installed_lowkv_finds_its_files_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import lowkv.assets\n"
        f"print(*[lowkv.assets.asset(name) for name in {ASSETS}], sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(installed / "lowkv" / "_data" / name) for name in ASSETS]
