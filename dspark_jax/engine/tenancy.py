"""Who has a slot: admission, prompts in pieces, prefixes that are known already, and preemption.

Memory is counted in tokens (``EngineConfig.kv_cache_tokens``). Requests are served in the order in which they came.
Where those at work outgrow the memory, the youngest gives up its slot and joins the waiting line at its old place; its
tokens, its seed and its cycle number are kept, so that it goes on exactly where it was: under ``coupled``, at
temperature 0 and at fixed verification lengths its text is that of one that was never interrupted. Nothing of the
cycle in flight is thrown away (it is read first), so no random number is drawn twice and none need be drawn anew.
Where lengths are scheduled, a resumed request starts from the prior, so its lengths may differ and with them the text
of ``rejection``, whose law stays.
"""

from __future__ import annotations

import bisect
from collections import deque

import jax
import numpy as np

from dspark_jax.engine.counters import Counters
from dspark_jax.engine.flight import Flight
from dspark_jax.engine.ground import Ground
from dspark_jax.engine.prefix_cache import BLOCK, PrefixCache, Saving
from dspark_jax.engine.request import Event
from dspark_jax.engine.seeds import Seeds
from dspark_jax.engine.slots import Slots, Tenant
from dspark_jax.types import Array


class Tenancy(Ground):
    """The part of an engine that gives slots to requests and takes them back. ``loop.Engine`` is the whole."""

    _counters: Counters

    def _vacate(self) -> None:
        """Nobody waits, nobody runs, nothing is remembered of any text."""
        self._waiting: deque[Tenant] = deque()
        self._slots = Slots(self.config.max_num_seqs)
        self._seeds = Seeds()
        self._cancelled: list[Tenant] = []
        self._asked: set[int] = set()  # to be preempted at the next step
        self._flights: deque[Flight] = deque()
        self._events: dict[int, Event] = {}
        self._prefixes = PrefixCache(self.buckets.stored_blocks)
        self._saving: deque[tuple[Saving, Array]] = deque()  # dispatched copies whose soundness is not yet read
        self._alone = False  # only cycles ran since the last one
        self._absorbed = False  # held tokens were absorbed for the cycle that is being dispatched
        self._pieces: list[tuple[int, int]] = []  # of prompts in this step: tokens with padding, cells of the cache
        self._last_drafts = 0  # that the last cycle was planned with

    def _settle(self, keep: int) -> None:
        raise NotImplementedError

    def _dispatched(self, flight: Flight) -> None:
        raise NotImplementedError

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Frees the slots of cancelled requests, takes slots from those for whom there is no memory, gives free ones to
        waiting requests in their order, and runs pieces of prompts, at least one: decoding goes on between them."""
        for tenant in self._cancelled:
            self._release(tenant)
        self._cancelled = []
        if not self._flights:
            self._confirm()  # nothing to wait for
        self._preempt()
        working = sum(t.may_emit for t in self._slots)
        taken = working + self._last_drafts if working else 0
        room = min(max(self.step_tokens - taken, 0), self.buckets.prefill[-1])
        self._pieces = []
        while (newcomer := self._newcomer(bool(self._pieces), room)) is not None:
            room -= self._prefill(newcomer, room)
        if self._waiting and self._has_memory_for(self._waiting[0]):
            return  # they will fill the holes
        while (move := self._slots.compaction(self.buckets.slot_bucket)) is not None:
            self._state = self._programs.move(self._state, *move)
            self._counters.add("moves")
            self._alone = False

    def _newcomer(self, begun: bool, room: int) -> Tenant | None:
        """Whose prompt is next: the one that is under way, else the first that waits, if there are a slot and memory
        for it. ``begun``: this step has run a piece already, so another one must fit into ``room``."""
        if begun and room < self.buckets.prefill[0]:
            return None
        for tenant in self._slots:
            if not tenant.decoding and tenant.finish_reason is None:
                return tenant
        if not self._waiting or not self._slots.vacant:
            return None
        first = self._waiting[0]
        if not self._has_memory_for(first):
            return None
        self._slots.take(self._waiting.popleft())
        self._welcome(first)
        return first

    def _welcome(self, tenant: Tenant) -> None:
        """Sets up the slot of a request that has just got one, with what is known of its text."""
        request, text = tenant.request, tenant.text
        found = self._prefixes.match(text, len(text) - 1)  # the last token is computed in any case
        if not tenant.admitted:
            if self._competes and not request.coupled:
                tenant.seed = self._seeds.claim(tenant.id, tenant.seed)
            tenant.correction = self._corrections.of(request)
            tenant.admitted, tenant.cached = True, len(found) * BLOCK
            if self.buckets.stored_blocks:
                self._counters.add("prefix_cache_queries", len(text))
                self._counters.add("prefix_cache_hits", tenant.cached)
        start = max(len(found) * BLOCK - self._lookback, 0)
        self._state = self._programs.admit(self._state, tenant.slot, self._programs.arrays.values(tenant, start))
        if found:
            self._state = self._programs.load(self._state, tenant.slot, 0, [block.row for block in found])
            # The tokens looked back on are absorbed without those before them, which spoils their own cells.
            tenant.again = found[start // BLOCK :] if self._lookback else []
        tenant.prefilled = start

    def _prefill(self, tenant: Tenant, room: int) -> int:
        """Dispatches the next piece of a text. Returns its tokens, padding included."""
        text, slot, resumed = tenant.text, tenant.slot, bool(tenant.tokens)
        piece = self.buckets.piece(tenant.prefilled, len(text), room)
        end = piece.start + piece.count
        last = end == len(text)
        self._state, packed = self._programs.prefill(self._state, slot, piece, text, last and not resumed)
        if tenant.again:
            first, rows = piece.start // BLOCK, [block.row for block in tenant.again]
            self._state = self._programs.load(self._state, slot, first, rows)
            tenant.again = []
        tenant.prefilled = end
        self._alone = False
        self._pieces.append((piece.size, piece.context))
        self._counters.prefill(piece)
        if last and resumed:
            values = self._programs.arrays.values(tenant, len(text), resumed=True)
            self._state = self._programs.admit(self._state, slot, values)
            tenant.decoding = True
        elif last:
            tenant.decoding, tenant.promised = True, 1
            self._dispatched(Flight((tenant,), packed))
        return piece.size

    # -- memory ----------------------------------------------------------------------------------------------

    def _need(self, tenant: Tenant) -> int:
        """Tokens it may have cached behind the next cycle, drafts included."""
        return tenant.length_bound(self.buckets.width) + self.buckets.width

    def _needed(self) -> int:
        return sum(self._need(t) for t in self._slots)

    def _has_memory_for(self, tenant: Tenant) -> bool:
        """Beside those who have a slot; one alone always has."""
        return not len(self._slots) or self._needed() + self._need(tenant) <= self.cache_tokens

    def _preempt(self) -> None:
        """Takes slots away: from those who were asked to leave, and from the youngest while there is too little
        memory. The oldest is never among them, so everybody's turn comes."""
        if not self._asked and self._needed() <= self.cache_tokens:
            return
        self._settle(0)  # what is in flight is part of what they go on from; and may be less than feared
        leaving = sorted((t for t in self._slots if t.id in self._asked), key=lambda t: t.id)
        self._asked.clear()
        for tenant in leaving:
            self._send_back(tenant)
        while len(self._slots) > 1 and self._needed() > self.cache_tokens:
            self._send_back(max(self._slots, key=lambda t: t.id))
        self._confirm()  # they may be back at once, and find what they left

    def _send_back(self, tenant: Tenant) -> None:
        """Off its slot, and to its place in the waiting line."""
        if tenant.decoding:
            self._remember(tenant, tenant.known - tenant.held)
        self._vacate_slot(tenant)
        tenant.leave()
        place = bisect.bisect([t.id for t in self._waiting], tenant.id)
        self._waiting.insert(place, tenant)
        self._counters.add("preemptions")

    def _release(self, tenant: Tenant) -> None:
        """Of a request that has ended: its slot is free, and its numbers may be used again."""
        self._vacate_slot(tenant)
        self._seeds.release(tenant.id)

    def _vacate_slot(self, tenant: Tenant) -> None:
        """Frees the slot, on the device too: an idle row costs its neighbours nothing."""
        slot = self._slots.release(tenant)
        self._state = self._programs.admit(self._state, slot, self._programs.arrays.idle())

    # -- prefixes --------------------------------------------------------------------------------------------

    def _remember(self, tenant: Tenant, count: int) -> None:
        """Keeps what the tenant's slot holds of the first ``count`` tokens of its text."""
        saving = self._prefixes.save(tenant.text, count) if count >= BLOCK else None
        if saving is None:
            return
        rows = [block.row for block in saving.blocks]
        self._state, sound = self._programs.save(self._state, tenant.slot, saving.first, rows)
        self._alone = False
        self._saving.append((saving, sound))

    def _confirm(self) -> None:
        """Reads whether the copies that were dispatched are of finite numbers; they can be used from now on."""
        while self._saving:
            saving, sound = self._saving.popleft()
            fine = bool(np.asarray(jax.device_get(sound)))
            self._prefixes.confirm(saving, fine)
            if not fine:
                self._counters.add("prefix_cache_refused", len(saving.blocks))

    def _kept(self, tenant: Tenant, flight: Flight, finished: bool) -> None:
        """What a cycle (or the end of a prefill) that was just read says about cells that will not change any more.

        Cells below ``whole`` are those of the text in the target's cache and in the drafter's. It is counted while the
        request goes on: once it has ended on the device, a cycle dispatched before the host knew may absorb what waits
        in the ring one place too early, behind ``whole``.
        """
        if not self.buckets.stored_blocks:
            return
        if flight.plan is None:
            self._remember(tenant, len(tenant.request.prompt))
        if finished:
            self._remember(tenant, tenant.whole)
        else:
            tenant.whole = tenant.known - tenant.held

    def _event(self, tenant: Tenant) -> Event:
        """The tenant's event of this step."""
        event = self._events.setdefault(tenant.id, Event(tenant.id))
        event.cached_tokens = tenant.cached or 0
        return event
