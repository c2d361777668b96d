"""Control pages: what a rank says of itself, in order, over processes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from census import no_growth
from device_helpers import run_python

from graphshard._core import ControlPage, Driver, DriverError, Memory

NUM_HANDOFFS = 100_000
PAYLOAD_BYTES = 64


def open_copy(page: ControlPage) -> ControlPage:
    fd = page.fd()
    try:
        return ControlPage.open_fd(fd)
    finally:
        os.close(fd)


def test_a_page_is_read_where_it_is_mapped() -> None:
    with no_growth():
        page = ControlPage()
        peer = open_copy(page)
        assert (peer.pid, peer.state, peer.epoch, peer.step, peer.op) == (os.getpid(), 1, 0, 0, 0)
        page.set_identity(77, bytes(range(32)))
        page.set_state(2)
        page.set_epoch(3)
        page.set_progress(1 << 40, 53)
        assert (peer.pid, peer.state, peer.epoch, peer.step, peer.op) == (77, 2, 3, 1 << 40, 53)
        assert peer.digest == bytes(range(32))
        del page
        assert peer.pid == 77
        del peer


def test_batches_of_collectives_are_posted_in_order_and_the_latest_can_be_read() -> None:
    page = ControlPage()
    peer = open_copy(page)
    assert (peer.num_issues, peer.issue(0), peer.issue(1)) == (0, None, None)
    for number in range(1, 101):
        assert page.post_issue((1 << 64) - number, number) == number
    assert peer.num_issues == 100
    assert peer.issue(100) == ((1 << 64) - 100, 100)
    assert peer.issue(101) is None, "not posted yet"
    assert peer.issue(37) == ((1 << 64) - 37, 37)
    assert peer.issue(36) is None, "another one took its place"
    page.set_begun(7, 12)
    page.set_num_finished(99)
    assert (peer.begun_step, peer.begun_op, peer.num_finished) == (7, 12, 99)


def test_the_first_failure_of_a_page_stays() -> None:
    page = ControlPage()
    peer = open_copy(page)
    assert (peer.has_failed, peer.failure) == (False, None)
    page.post_failure("rank 1 did not arrive", 2, step=4, culprit=1)
    page.post_failure("and then this", 3)
    assert peer.failure == ("rank 1 did not arrive", 2, -1, -1, 4, 1)
    other = ControlPage()
    other.post_failure("\u00e9" * 2000 + "!", 1)
    assert open_copy(other).failure == ("\u00e9" * 640, 1, -1, -1, -1, -1), "what does not fit is cut"


def test_ranks_that_fail_at_once_agree_on_one() -> None:
    for _ in range(50):
        page = ControlPage()
        assert page.first_failed is None
        peers = [open_copy(page) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            told = set(pool.map(lambda peer, rank: peer.claim_first(rank), peers, range(4)))
        assert told == {page.first_failed} and page.claim_first(7) in told


def test_what_is_no_page_is_refused() -> None:
    fd = os.memfd_create("not a page")
    try:
        with pytest.raises(DriverError, match="holds 0 bytes, not 4096"):
            ControlPage.open_fd(fd)
        os.truncate(fd, 4096)
        with pytest.raises(DriverError, match="is no control page: its magic differs"):
            ControlPage.open_fd(fd)
    finally:
        os.close(fd)
    with pytest.raises(DriverError, match="fstat failed"):
        ControlPage.open_fd(-1)
    with pytest.raises(ValueError, match="32 bytes"):
        ControlPage().set_identity(1, b"short")


def test_a_page_cannot_be_shrunk_under_its_readers() -> None:
    fd = ControlPage().fd()
    with pytest.raises(PermissionError):
        os.truncate(fd, 0)
    os.close(fd)


PEER = """
    import os, sys
    from graphshard._core import ControlPage, Driver, Memory
    driver = Driver(sys.argv[1])
    window, page, reply = (int(fd) for fd in sys.argv[2:5])
    num_handoffs, num_bytes = int(sys.argv[5]), int(sys.argv[6])
    payload = memoryview(Memory.import_fd(driver, window, num_bytes))
    page, reply = ControlPage.open_fd(page), ControlPage.open_fd(reply)
    wrong = 0
    for step in range(1, num_handoffs + 1):
        while page.step < step:
            os.sched_yield()
        wrong += payload != step.to_bytes(8, "little") * (num_bytes // 8)
        reply.set_progress(step, 0)
    reply.set_epoch(2 * (wrong + 1))
"""


def test_payload_is_seen_with_the_step_that_announces_it(driver: Driver) -> None:
    window = Memory(driver, PAYLOAD_BYTES, exportable=True)
    page, reply = ControlPage(), ControlPage()
    fds = [window.export_fd(), page.fd(), reply.fd()]
    payload = memoryview(window)
    arguments = [driver.path, *map(str, fds), str(NUM_HANDOFFS), str(PAYLOAD_BYTES)]
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(run_python, PEER, *arguments, pass_fds=fds)
        for step in range(1, NUM_HANDOFFS + 1):
            payload[:] = step.to_bytes(8, "little") * (PAYLOAD_BYTES // 8)
            page.set_progress(step, 0)
            while reply.step < step:
                os.sched_yield()
                if peer.done():
                    pytest.fail(f"the peer ended at step {step}: {peer.result().stderr}")
        done = peer.result()
    for fd in fds:
        os.close(fd)
    assert (done.returncode, done.stderr, reply.epoch) == (0, "", 2)
