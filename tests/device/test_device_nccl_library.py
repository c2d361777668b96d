"""NCCL libraries by path: what is loaded, what it lacks, and what errors say."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_helpers import run_python
from fake_nccl import FakeNccl, build, open_communicator

from graphshard._core import Communicator, Driver, NcclError, NcclLibrary


def test_library_says_what_is_loaded(fake: FakeNccl, driver: Driver) -> None:
    library = NcclLibrary(fake.path, driver)
    assert (library.path, library.version, library.missing) == (fake.path, 22809, [])
    assert library.unique_id() == b"\x07" * 128


def test_missing_entry_points_are_listed_and_refused(driver: Driver, tmp_path: Path) -> None:
    """An old library loads, and says what it lacks, which version it is, and where it is."""
    path = build(tmp_path, "libold.so", "-DVERSION=22602", "-DNO_WINDOWS")
    library = NcclLibrary(str(path), driver)
    assert library.version == 22602
    assert library.missing == ["ncclCommWindowRegister", "ncclCommWindowDeregister"]
    with pytest.raises(NcclError) as refused:
        open_communicator(library)
    assert (refused.value.entry_point, refused.value.code) == ("ncclCommWindowRegister", 5)
    assert str(refused.value) == (
        f"libnccl 2.26.2 ({path}) is loaded, which lacks ncclCommWindowRegister, ncclCommWindowDeregister: symmetric "
        "windows need 2.28.3 or newer; install it, or use transport pull"
    )


def test_path_is_of_the_mapped_file(driver: Driver, tmp_path: Path) -> None:
    """Asked for by SONAME, the loader gives the copy that the process has, wherever that came from."""
    other = tmp_path / "other"
    other.mkdir()
    first = build(tmp_path, "libfirst.so", "-DVERSION=22809", "-Wl,-soname,libtwice.so.7")
    build(other, "libtwice.so.7", "-DVERSION=23102", "-Wl,-soname,libtwice.so.7")
    assert NcclLibrary(str(first), driver).version == 22809
    by_name = NcclLibrary("libtwice.so.7", driver)
    assert (by_name.path, by_name.version) == (str(first), 22809)
    by_path = NcclLibrary(str(other / "libtwice.so.7"), driver)
    assert by_path.version == 23102


@pytest.mark.parametrize(("name", "entry_point"), [("nowhere/libnccl.so.2", "dlopen"), (None, "ncclGetVersion")])
def test_what_is_no_nccl_is_refused(driver: Driver, name: str | None, entry_point: str) -> None:
    path = name or driver.path
    with pytest.raises(NcclError, match=path) as refused:
        NcclLibrary(path, driver)
    assert refused.value.entry_point == entry_point


@pytest.mark.parametrize(("version", "told"), [(22602, 22602), (22809, 22809), (23203, 22809)])
def test_config_asks_for_no_sm(driver: Driver, tmp_path: Path, version: int, told: int) -> None:
    """The version that a configuration names is no newer than the library, nor than our declaration of it."""
    path = build(tmp_path, f"libversion{version}.so", f"-DVERSION={version}")
    library = NcclLibrary(str(path), driver)
    communicator = open_communicator(library, "draft")
    assert FakeNccl(path).calls() == [
        f"ncclCommInitRankConfig rank=1/2 id=7 size=80 magic=cafebeef version={told} blocking=1 cta=2 name=draft"
    ]
    assert (communicator.name, communicator.rank, communicator.world_size) == ("draft", 1, 2)
    assert communicator.abort(60.0)


def test_arguments_that_cannot_be_are_refused(library: NcclLibrary) -> None:
    with pytest.raises(ValueError, match="a unique id has 128 bytes, these are 3"):
        Communicator(library, b"abc", 2, 0, "weights", 1.0)
    with pytest.raises(ValueError, match="rank 2 of 2; ranks are 0 to world_size - 1"):
        Communicator(library, library.unique_id(), 2, 2, "weights", 1.0)
    for timeout_s in (float("inf"), float("nan"), -1.0):
        with pytest.raises(ValueError, match="waits are never unbounded"):
            Communicator(library, library.unique_id(), 2, 0, "weights", timeout_s)


def test_a_failed_call_says_all_that_is_known(fake: FakeNccl, library: NcclLibrary) -> None:
    fake.fail("ncclCommInitRankConfig", 3)
    with pytest.raises(NcclError) as failed:
        open_communicator(library)
    assert (failed.value.entry_point, failed.value.code) == ("ncclCommInitRankConfig", 3)
    assert str(failed.value) == (
        "ncclCommInitRankConfig failed: ncclInternalError (3), internal error; last error: the fake was told to, at "
        f"communicator 'weights', rank 1 of 2, libnccl 2.28.9 ({fake.path})"
    )


def test_a_forked_child_is_refused(fake: FakeNccl, driver: Driver) -> None:
    code = """
    import os, sys
    from graphshard._core import Communicator, Driver, NcclLibrary
    library = NcclLibrary(sys.argv[2], Driver(sys.argv[1]))
    communicator = Communicator(library, library.unique_id(), 1, 0, "weights", 60.0)
    if os.fork() == 0:
        for call in (library.unique_id, lambda: communicator.allocate(1), lambda: communicator.destroy(60.0),
                     lambda: communicator.abort(60.0), communicator.async_error):
            try:
                call()
            except Exception as error:
                print(type(error).__name__, "opened before a fork" in str(error), flush=True)
        del communicator, library
        os._exit(0)
    os.wait()
    print(communicator.destroy(60.0))
    """
    done = run_python(code, driver.path, fake.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "DriverError True\n" * 5 + "True\n", "")
