"""One engine on the devices of several processes: process 0 decides, the others do what it says.

Every process runs the same compiled programs on its part of the mesh, in the same order. What they run, and with which
small numbers (slots, tokens of a prompt, drafts to verify), is decided once and sent as integers. Decisions rest on
arrival times and measured milliseconds, which differ between processes: two of them deciding alike would sooner or
later choose different programs and wait for each other for ever.

The integers go over a socket and not through the devices, where they would queue behind the running cycle.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from dspark_jax.cycle import DecodeState
from dspark_jax.engine.buckets import Key
from dspark_jax.engine.programs import Programs
from dspark_jax.types import Array

KINDS = ("admit", "copy", "absorb", "prefill", "draft", "verify", "plain")
RUN, START, COMPILE, REHEARSE, REST, END = range(6)
CONNECT_S = 120.0
"""Seconds that processes wait for each other at the start."""


class Link:
    """A line from process 0 to every other one. ``leads``: this is process 0, which has a socket for each of them, by
    their ``ranks``."""

    def __init__(self, sockets: Sequence[socket.socket], leads: bool, ranks: Sequence[int] = ()) -> None:
        self._sockets, self.leads, self._ranks = list(sockets), leads, list(ranks)
        self._closed = False

    def tell(self, words: np.ndarray) -> None:
        """Sends int32 words to every follower. Raises ConnectionError where one is gone."""
        data = np.ascontiguousarray(words, np.int32).tobytes()
        for each in self._sockets:
            each.sendall(struct.pack("<I", len(data)) + data)

    def listen(self) -> np.ndarray | None:
        """The next words, or None where process 0 has closed its end. Raises ConnectionError where it is just gone."""
        words = np.frombuffer(self._read(struct.unpack("<I", self._read(4))[0]), np.int32)
        return None if words[0] == END else words

    def watch(self, lost: Callable[[int], None]) -> None:
        """Calls ``lost`` with the rank of a process that is gone, in a thread of its own, as soon as its system says
        so. For process 0. The others say nothing over the line, so whatever is read from it is its end."""

        def wait(line: socket.socket, rank: int) -> None:
            with contextlib.suppress(OSError):
                line.recv(1)
            if not self._closed:
                lost(rank)

        for line, rank in zip(self._sockets, self._ranks, strict=True):
            threading.Thread(target=wait, args=(line, rank), name=f"dspark-watch-{rank}", daemon=True).start()

    def close(self) -> None:
        """Ends the line; process 0 tells the others, which then stop listening."""
        self._closed = True
        if self.leads:
            with contextlib.suppress(OSError):  # one of them is gone already
                self.tell(np.asarray([END], np.int32))
        for each in self._sockets:
            each.close()

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._sockets[0].recv(size - len(parts))
            except OSError:
                part = b""
            if not part:
                raise ConnectionError("process 0 is gone, and this one cannot go on alone: start all of them again")
            parts += part
        return bytes(parts)


def connect(host: str = "127.0.0.1") -> Link | None:
    """Joins the processes of ``jax.distributed``: process 0 listens at its own address ``host``, which the others can
    reach; a collective tells them the port. None where there is one process only.

    Raises:
        TimeoutError: a process did not come, or did not say which one it is.
        ConnectionError: a process was gone before it had said it.
    """
    count = jax.process_count()
    if count == 1:
        return None
    from jax.experimental.multihost_utils import broadcast_one_to_all

    leads = jax.process_index() == 0
    with socket.socket() as server:
        server.settimeout(CONNECT_S)
        if leads:
            server.bind((host, 0))
            server.listen(count)
        port = server.getsockname()[1] if leads else 0
        port = int(broadcast_one_to_all(np.int32(port), is_source=leads))
        lines, ranks = _others(server, count - 1) if leads else ([], [])
    if not leads:
        lines = [socket.create_connection((host, port), CONNECT_S)]
        lines[0].sendall(struct.pack("<I", jax.process_index()))
    for line in lines:
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(lines, leads, ranks)


def _others(server: socket.socket, count: int) -> tuple[list[socket.socket], list[int]]:
    """The lines to the others that come, and which processes they are. Raises TimeoutError, ConnectionError."""
    with contextlib.ExitStack() as lines:  # closed where not all are there
        came = []
        try:
            for _ in range(count):
                came.append(lines.enter_context(server.accept()[0]))
            ranks = [_said(line) for line in came]
        except TimeoutError:
            host, port = server.getsockname()[:2]
            raise TimeoutError(
                f"process 0 waited for {count} others at {host} port {port}; they were not there within "
                f"{CONNECT_S:.0f} s"
            ) from None
        lines.pop_all()
    return came, ranks


def _said(line: socket.socket) -> int:
    """The rank of the process at the other end."""
    line.settimeout(CONNECT_S)
    said = bytearray()
    while len(said) < 4:
        part = line.recv(4 - len(said))
        if not part:
            raise ConnectionError("a process was gone before it had said which one it is: start all of them again")
        said += part
    return int(struct.unpack("<I", said)[0])


class SharedPrograms(Programs):
    """Programs that several processes run together."""

    def __init__(self, *arguments: Any, link: Link, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._link = link
        self._joint = 0  # within something that every process does of its own accord

    def init_state(self) -> DecodeState:
        return self._together([START], super().init_state)

    def compile_all(self, keys: Sequence[Key], state: DecodeState, progress: Callable[[str], None]) -> DecodeState:
        words = [COMPILE, *(word for key in keys for word in _key_words(key))]
        parent = super().compile_all
        return self._together(words, lambda: parent(keys, state, progress))

    def rehearse(self, key: Key, state: DecodeState) -> tuple[DecodeState, float]:
        parent = super().rehearse
        return self._together([REHEARSE, *_key_words(key)], lambda: parent(key, state))

    def rest(self, state: DecodeState) -> DecodeState:
        parent = super().rest
        return self._together([REST], lambda: parent(state))

    def _together(self, words: Sequence[int], act: Callable[[], Any]) -> Any:
        """Has the followers do the same, and does it."""
        if self._link.leads and not self._joint:
            self._link.tell(np.asarray(words, np.int32))
        self._joint += 1
        try:
            return act()
        finally:
            self._joint -= 1

    def _run(self, key: Key, *arguments: Any) -> Any:
        if self._link.leads and not self._joint:
            numbers = [np.atleast_1d(np.asarray(a)) for a in _numbers(arguments)]
            words = [np.ascontiguousarray(_widened(a)).view(np.int32).ravel() for a in numbers]
            self._link.tell(np.concatenate([np.asarray([RUN, *_key_words(key)], np.int32), *words]))
        return super()._run(key, *arguments)

    def follow(self) -> None:
        """Does what process 0 says, from the making of a state on, until it ends. For all other processes.

        Raises:
            ConnectionError: process 0 is gone.
        """
        state: Any = None
        draft: Any = None
        while (words := self._link.listen()) is not None:
            self._joint = 1
            match int(words[0]):
                case n if n == START:
                    state = draft = None  # frees the old ones first; nothing else here holds on to them
                    state = self.init_state()
                case n if n == COMPILE:
                    keys = [_key(words[i : i + 4]) for i in range(1, len(words), 4)]
                    state = self.compile_all(keys, state, lambda line: None)
                case n if n == REHEARSE:
                    state, _ = self.rehearse(_key(words[1:5]), state)
                case n if n == REST:
                    state = self.rest(state)
                case n if n == RUN:
                    state, draft = self._repeat(_key(words[1:5]), state, draft, words[5:])
                case unknown:
                    _refuse(unknown)

    def _repeat(self, key: Key, state: DecodeState, draft: Any, words: np.ndarray) -> tuple[DecodeState, Any]:
        """Runs what process 0 runs; the state and the draft that there are then."""
        out = self._run(key, *self._arguments(key, state, draft, words))
        if key.kind == "draft":
            self._proposal = out.proposal
            return state, out
        return (out[0] if isinstance(out, tuple) else out), draft

    def _arguments(self, key: Key, state: DecodeState, draft: Any, words: np.ndarray) -> tuple[Any, ...]:
        """A program's arguments: arrays on devices are this process's own, numbers are those that were sent."""
        if key.kind == "verify":
            admitted = words.copy() if words.size else draft.admitted
            return state, draft.proposal, admitted
        leaves, structure = jax.tree.flatten(self._example(key, state))
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Array):
                wide = _widened(np.asarray(leaf))
                size = wide.size * wide.itemsize // 4
                sent, words = words[:size].copy().view(wide.dtype), words[size:]
                leaves[i] = sent.reshape(np.shape(leaf)).astype(np.asarray(leaf).dtype)
        return tuple(jax.tree.unflatten(structure, leaves))


def _numbers(arguments: Sequence[Any]) -> list[Any]:
    """The arguments that are on the host."""
    return [leaf for leaf in jax.tree.leaves(arguments) if not isinstance(leaf, Array)]


def _widened(a: np.ndarray) -> np.ndarray:
    """Booleans as int32; all else a program takes is a multiple of four bytes wide already."""
    return a.astype(np.int32) if a.dtype == bool else a


def _key_words(key: Key) -> list[int]:
    return [KINDS.index(key.kind), key.slots, key.tokens, key.context]


def _key(words: np.ndarray) -> Key:
    kind, slots, tokens, context = (int(w) for w in words)
    return Key(KINDS[kind], slots, tokens, context)


def _refuse(unknown: int) -> NoReturn:
    raise RuntimeError(f"process 0 said {unknown}, which means nothing here: do all processes run the same version?")
