"""The line between processes: what a follower does of what it is told, without a second process."""

from __future__ import annotations

import gc
import socket
import threading
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.engine import Engine, EngineConfig, Request, multiprocess
from dspark_jax.engine.multiprocess import START, Link
from dspark_jax.engine.programs import Programs

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=24, mode="fixed", slot_buckets=(2,), prefill_buckets=(8,))


class Recorder(Link):
    """Process 0 of a line to nobody; what it says is kept."""

    def __init__(self) -> None:
        super().__init__([], True)
        self.said: list[np.ndarray] = []

    def tell(self, words: np.ndarray) -> None:
        self.said.append(np.array(words, np.int32))


class Player(Link):
    """A follower's end at which those words come in."""

    def __init__(self, said: list[np.ndarray]) -> None:
        super().__init__([], False)
        self._said = iter(said)

    def listen(self) -> np.ndarray | None:
        return next(self._said, None)


def slot_caches(engine: Engine) -> int:
    """Arrays alive, whosoever, that have the shape of the caches of this engine's slots."""
    gc.collect()
    shapes = {a.shape for a in jax.tree.leaves((engine._state.target, engine._state.draft))}
    return sum(array.shape in shapes for array in jax.live_arrays() if not array.is_deleted())


def test_a_follower_holds_no_old_state_when_a_new_one_is_made(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 0 starts, decodes and starts anew; its follower makes every state with the old one's memory free, and
    ends up with one."""
    target, drafter = tiny
    lead = Recorder()
    leader = Engine(target, drafter, CONFIG, link=lead)
    for _ in range(2):
        leader.submit(Request([3, 1, 4], max_new_tokens=6, seed=1))
        leader.run()
        leader.reset()
    assert [int(words[0]) for words in lead.said].count(START) == 3
    others = slot_caches(leader)
    before: list[int] = []
    make = Programs.init_state

    def init_state(self: Programs) -> Any:
        before.append(slot_caches(leader) - others)
        return make(self)

    monkeypatch.setattr(Programs, "init_state", init_state)
    follower = Engine(target, drafter, CONFIG, link=Player(lead.said))
    monkeypatch.setattr(follower._programs, "_table", leader._programs._table)  # nothing to compile again
    follower.follow()
    assert before == [0] * 4  # one of its own beginning
    assert slot_caches(leader) == others


def ends() -> tuple[Link, Link]:
    a, b = socket.socketpair()
    return Link([a], True, [1]), Link([b], False)


def test_a_closed_line_is_an_end_and_a_cut_one_an_error() -> None:
    leader, follower = ends()
    leader.tell(np.asarray([START]))
    leader.close()
    assert follower.listen().tolist() == [START]  # type: ignore[union-attr]
    assert follower.listen() is None
    follower.close()
    for said in (b"", b"\x08\x00\x00\x00\x00"):  # between words, and within
        a, b = socket.socketpair()
        a.sendall(said)
        a.close()
        with b, pytest.raises(ConnectionError, match="process 0 is gone.*start all of them again"):
            Link([b], False).listen()


def test_process_0_notices_a_process_that_is_gone_but_not_its_own_end() -> None:
    for cut in (True, False):
        leader, follower = ends()
        lost: list[int] = []
        noticed = threading.Event()
        leader.watch(lambda rank, lost=lost, noticed=noticed: (lost.append(rank), noticed.set()))  # type: ignore[misc]
        (follower if cut else leader).close()
        assert noticed.wait(5 if cut else 0.2) == cut
        assert lost == ([1] if cut else [])
        leader.close()
        follower.close()


@pytest.mark.parametrize(
    ("says", "leaves", "error", "reason"),
    [
        (b"\1\0", True, ConnectionError, "gone before it had said"),
        (b"", False, TimeoutError, "waited for 1 others"),
    ],
)
def test_who_comes_and_does_not_say_which_process_it_is_ends_the_start(
    says: bytes, leaves: bool, error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that dies there, and a stranger who found the port: no waiting for ever, and a line that says why."""
    came: list[socket.socket] = []

    def tell(port: Any, is_source: bool) -> Any:  # in place of the collective: the other one hears the port, and comes
        came.append(socket.create_connection(("127.0.0.1", int(port))))
        came[0].sendall(says)
        if leaves:
            came[0].close()
        return port

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.experimental.multihost_utils.broadcast_one_to_all", tell)
    monkeypatch.setattr(multiprocess, "CONNECT_S", 0.3)
    with pytest.raises(error, match=reason):
        multiprocess.connect()
    if not leaves:
        assert came[0].recv(1) == b""  # process 0 has closed its end
    came[0].close()
