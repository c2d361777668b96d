"""Where the build takes cuda.h from: a folder it is given, or one of two wheels with layouts of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CMAKE_FOLDER = Path(__file__).parents[2] / "cmake"
LAYOUTS = {"cu12": "nvidia/cuda_runtime/include", "cu13": "nvidia/cu13/include"}


def make_headers(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "cuda.h").write_text(f"/* a comment */\n#define CUDA_VERSION {version}\n#define CUDA_VERSION_TEXT\n")
    (folder / "cudaTypedefs.h").write_text("")
    return folder


def find(*site_folders: Path) -> str:
    """What the script prints in a Python that sees only `site_folders`."""
    script = [sys.executable, "-S", str(CMAKE_FOLDER / "find_cuda_headers.py")]
    env = {"PYTHONPATH": os.pathsep.join(map(str, site_folders)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize("wheel", LAYOUTS)
def test_each_wheels_layout_is_found(tmp_path: Path, wheel: str) -> None:
    include = make_headers(tmp_path / LAYOUTS[wheel], "13000")
    assert find(tmp_path) == str(include)


def test_the_required_wheel_comes_first(tmp_path: Path) -> None:
    make_headers(tmp_path / "one" / LAYOUTS["cu13"], "13050")
    required = make_headers(tmp_path / "two" / LAYOUTS["cu12"], "12090")
    assert find(tmp_path / "one", tmp_path / "two") == str(required)


def test_wheels_without_headers_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / LAYOUTS["cu12"]).mkdir(parents=True)  # a runtime wheel stripped of its headers
    include = make_headers(tmp_path / LAYOUTS["cu13"], "13020")
    assert find(tmp_path) == str(include)
    assert find(tmp_path / "nothing") == ""


def configure(tmp_path: Path, include: Path) -> tuple[int, str]:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if cmake is None:
        pytest.skip("cmake is not installed here")
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.22)\nproject(headers NONE)\ninclude({CMAKE_FOLDER}/cuda_headers.cmake)\n"
    )
    command = [cmake, "-S", str(source), "-B", str(tmp_path / "build"), f"-DGRAPHSHARD_CUDA_INCLUDE_DIR={include}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("version", ["12090", "13000", "13050"])
def test_a_toolkit_folder_is_taken_as_given(tmp_path: Path, version: str) -> None:
    include = make_headers(tmp_path / "toolkit" / "include", version)
    code, text = configure(tmp_path, include)
    assert code == 0, text
    assert f"cuda.h {version}: {include}" in text


@pytest.mark.parametrize("version", ["12080", "14000", "none"])
def test_versions_out_of_range_are_refused(tmp_path: Path, version: str) -> None:
    code, text = configure(tmp_path, make_headers(tmp_path / "include", version))
    assert code != 0
    assert "12090 (12.9) up to 13.x are supported" in text


def test_a_folder_without_headers_names_what_to_install(tmp_path: Path) -> None:
    code, text = configure(tmp_path, tmp_path / "nowhere")
    assert code != 0
    assert "cuda.h was not found" in text and "nvidia-cuda-runtime>=13" in text
