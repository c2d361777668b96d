"""Which copy of NCCL is used: two copies in one process, the mapped one before the wheel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphshard.comm.nccl_library import choose_library, find_library, mapped_libraries
from graphshard.core.errors import CommError
from graphshard.device import open_device

TORCH = "/venv/torch/lib/libnccl.so.2"
MAPS = f"""\
7f00-7f01 r-xp 00000000 08:01 11 {TORCH}
7f01-7f02 r--p 00001000 08:01 11 {TORCH}
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r-xp 00000000 08:01 12 /usr/lib/libnccl-net.so
7f04-7f05 r-xp 00000000 08:01 13 /usr/lib/libc.so.6
"""


def test_the_mapped_copy_is_found_once() -> None:
    assert mapped_libraries(MAPS) == [Path(TORCH)]
    assert mapped_libraries("7f02-7f03 rw-p 00000000 00:00 0\n") == []
    versioned = "7f00-7f01 r-xp 00000000 08:01 11 /opt/a b/libnccl.so.2.28.9 (deleted)\n"
    assert mapped_libraries(versioned) == [Path("/opt/a b/libnccl.so.2.28.9")]


def test_the_mapped_copy_comes_before_the_wheels(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").touch()
    assert choose_library([Path(TORCH)], [tmp_path]) == Path(TORCH)
    assert choose_library([], [tmp_path / "other", tmp_path]) == tmp_path / "lib" / "libnccl.so.2"


def test_two_copies_in_one_process_are_refused_by_name() -> None:
    text = MAPS + "7f05-7f06 r-xp 00000000 08:01 14 /usr/lib/libnccl.so.2\n"
    with pytest.raises(CommError, match=rf"2 copies of NCCL are mapped into this process \({TORCH}, /usr/lib/libnccl"):
        choose_library(mapped_libraries(text), [])


def test_no_copy_at_all() -> None:
    with pytest.raises(CommError, match=r"no libnccl\.so\.2 is mapped, and no wheel has one.*available here: pull"):
        choose_library([], [])


def test_here() -> None:
    assert find_library(open_device("host")).name == "libgraphshard_hostnccl.so"
