"""Locks between processes and users: real processes, of two users where the tests may change theirs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from secrets import token_hex

import pytest
from shared_server import IS_ROOT, NOBODY, OWN_USER, child, receive

from template_package.launching.gpu_locks import Holder, lock_holder, one_chooser, take_lock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is locked")

USERS = [OWN_USER, pytest.param(NOBODY, marks=pytest.mark.skipif(not IS_ROOT, reason="only root can be others"))]


def holding(name: str) -> Callable[[Connection], None]:
    """Work that takes a lock, says whether it could, and keeps it."""

    def work(pipe: Connection) -> None:
        lock = take_lock(name)
        pipe.send(lock is not None)
        time.sleep(60)

    return work


@pytest.fixture
def name() -> str:
    return f"GPU-test-{token_hex(8)}"


@pytest.mark.parametrize("uid", USERS)
def test_one_process_at_a_time_holds_a_lock_whoever_runs_it(uid: int, name: str) -> None:
    with child(holding(name), uid) as (pid, pipe):
        assert receive(pipe)
        assert take_lock(name) is None
        assert lock_holder(name) == Holder(pid, uid)
    own = take_lock(name)  # the holder was killed
    assert own is not None
    with child(holding(name), uid) as (_, pipe):
        assert not receive(pipe)
    own.close()
    with child(holding(name), uid) as (_, pipe):
        assert receive(pipe)


def test_locks_of_different_gpus_are_independent(name: str) -> None:
    with child(holding(name)) as (_, first), child(holding(f"{name}0")) as (_, second):
        assert receive(first) and receive(second)
    assert lock_holder(name) is None


def test_gpus_without_uuid_are_not_locked() -> None:
    first, second = take_lock(""), take_lock("")
    assert first is not None and second is not None
    first.close()
    second.close()


def test_holder_can_be_asked_a_thousand_times(name: str) -> None:
    with child(holding(name)) as (pid, pipe):
        receive(pipe)
        assert {lock_holder(name) for _ in range(1000)} == {Holder(pid, OWN_USER)}


def _choose(pipe: Connection) -> None:
    pipe.recv()
    with one_chooser():
        begin = time.monotonic()
        time.sleep(0.05)
        end = time.monotonic()
    pipe.send((begin, end))


def test_one_process_at_a_time_chooses() -> None:
    with child(_choose) as (_, first), child(_choose) as (_, second):
        for pipe in (first, second):
            pipe.send("go")
        (_, end), (begin, _) = sorted(receive(pipe) for pipe in (first, second))
    assert end <= begin


def _stop_while_choosing(pipe: Connection) -> None:
    with one_chooser():
        pipe.send("choosing")
        time.sleep(60)


def test_a_process_that_stopped_while_choosing_stops_no_other() -> None:
    with child(_stop_while_choosing) as (_, pipe):
        receive(pipe)
        begin = time.monotonic()
        with one_chooser(patience_seconds=0.2):
            assert 0.2 <= time.monotonic() - begin < 5
    begin = time.monotonic()
    with one_chooser():
        assert time.monotonic() - begin < 5
