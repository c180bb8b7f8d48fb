"""Random lives of requests and engines: every end is one, every ticket is released once."""

import itertools
import random
from collections import Counter

import pytest

from tests.pure.router.engines import ABORT, ERROR, LENGTH, World, ask, outputs, stats
from twostroke.errors import EngineDeadError, RequestError
from twostroke.kv_messages import KvReady, KvReceived, KvRelease
from twostroke.messages import AbortRequests, AddRequest, EventKind


class Fuzz(World):
    """Engines that do something at random with whatever they were sent."""

    def __init__(self, seed: int) -> None:
        self.rng, self.handles = random.Random(seed), itertools.count(1)
        count = self.rng.randint(2, 5)
        roles = ["decode", *(self.rng.choice(["prefill", "decode", "both"]) for _ in range(count))]
        self.live: dict[int, dict[int, AddRequest]] = {}
        self.has_ticket: set[tuple[int, int]] = set()
        self.loading: set[tuple[int, int]] = set()
        self.began: set[tuple[int, int]] = set()
        self.minted: dict[bytes, str] = {}
        self.released_ids: Counter[bytes] = Counter()
        self.aborted_legs: set[tuple[int, int]] = set()  # whose ends are not said yet
        self.open: set[int] = set()
        self.ends: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        super().__init__(
            *roles,
            num_blocks=self.rng.choice([12, 40, 400]),
            kv_mode=self.rng.choice(["pull", "stream"]),
            max_retries=self.rng.randint(0, 2),
            recompute_max_tokens=self.rng.choice([None, 30]),
            handoff_timeout_s=100.0,
        )

    def start(self, index: int, role: str, num_blocks: int = 101) -> None:
        self.live[index] = {}
        super().start(index, role, num_blocks)

    def flush(self):
        messages = super().flush()
        for index, message in messages:
            match message:
                case AddRequest(handle=handle):
                    assert handle not in self.live[index]
                    assert self.dispatcher.fleet[index].state != "gone"
                    self.live[index][handle] = message
                case AbortRequests(handles):
                    self.aborted_legs.update((index, handle) for handle in handles)
                case KvRelease(ids):
                    assert all(self.minted[tid] == self.ids[index] for tid in ids)
                    self.released_ids.update(ids)
        return messages

    def take(self, left) -> None:
        """What the clients are told."""
        for handle, count in zip(left.handles.tolist(), left.num_tokens.tolist(), strict=True):
            if handle in self.open:
                self.tokens[handle] += count
        self.ended(left.finished)

    def ended(self, ends) -> None:
        for end in ends:
            assert end.handle < 1 << 62
            if end.handle in self.open:
                self.open.discard(end.handle)
                self.ends[end.handle] += 1

    def end(self, index: int, handle: int, reason, **fields) -> None:
        leg = self.live[index].pop(handle)
        self.began.discard((index, handle))
        ends = [(handle, reason, None, "bad" if reason is ERROR else None)]
        events = [(handle, EventKind.FINISHED, self.clock.now())]
        left = self.dispatcher.on_outputs(index, outputs(events=events, ends=ends, **fields))
        self.take(left)
        assert leg.handle == handle

    # ------------------------------------------------------------ steps

    def step(self) -> None:
        what = self.rng.choices(
            ["submit", "leave", "work", "kill", "back", "time", "role", "twice"],
            [6, 2, 30, 0.7, 2, 1.5, 0.5, 0.5],
        )[0]
        getattr(self, f"do_{what}")()
        self.flush()

    def do_submit(self) -> None:
        handle = next(self.handles)
        request = ask(handle, self.rng.randint(1, 100), self.rng.choice([1, 8, 40]))
        beside = self.rng.choice([None, *self.open])
        try:
            self.dispatcher.submit(request, beside=beside)
        except EngineDeadError:
            assert not self.dispatcher.can_decode or self.dispatcher.settings.recompute_max_tokens
        else:
            self.open.add(handle)

    def do_leave(self) -> None:
        if self.open:
            handle = self.rng.choice(sorted(self.open))
            self.open.discard(handle)
            self.dispatcher.abort([handle, -1])

    def do_time(self) -> None:
        self.sleep(self.rng.choice([1, 15, 120]))

    def do_kill(self) -> None:
        engine = self.rng.choice(list(self.dispatcher.fleet))
        if engine.state != "gone":
            self.live[engine.index] = {}
            self.aborted_legs = {it for it in self.aborted_legs if it[0] != engine.index}
            self.ended(self.dispatcher.engine_died(engine.index, "killed"))

    def do_back(self) -> None:
        gone = [engine for engine in self.dispatcher.fleet if engine.state == "gone"]
        if gone:
            self.start(self.rng.choice(gone).index, self.rng.choice(["prefill", "decode", "both"]))

    def do_role(self) -> None:
        engine = self.rng.choice(list(self.dispatcher.fleet))
        try:
            self.dispatcher.set_role(engine.index, self.rng.choice(["prefill", "decode", "both"]))
        except RequestError:
            others = [other for other in self.dispatcher.fleet if other is not engine]
            assert engine.state == "gone" or not any(other.may_decode for other in others)

    def do_twice(self) -> None:
        """A message that was said before, or makes no sense."""
        index = self.rng.choice(list(self.live))
        handle = self.rng.choice([5, *self.open, *self.live[index]])
        if (index, handle) not in self.loading:
            late = KvReceived(handle=handle, error="late")
            leg = self.live[index].get(handle)
            if leg is None or leg.kv_receive is None:
                self.take(self.dispatcher.on_outputs(index, outputs(kv_received=[late])))

    def do_work(self, *, well: bool = False) -> None:
        """An engine goes on with one of its requests."""
        busy = [index for index, legs in self.live.items() if legs]
        if not busy:
            return
        index = self.rng.choice(busy)
        handle = self.rng.choice(sorted(self.live[index]))
        leg = self.live[index][handle]
        fails = not well and self.rng.random() < 0.15
        if (index, handle) in self.aborted_legs and self.rng.random() < 0.5:
            self.aborted_legs.discard((index, handle))
            self.end(index, handle, ABORT)
            return
        if leg.kv_send is not None:
            self.work_prefill(index, leg, fails)
        elif leg.kv_receive is not None and (index, handle) not in self.began:
            self.work_load(index, leg, fails)
        elif fails:
            self.end(index, handle, self.rng.choice([ERROR, ABORT]))
        elif self.rng.random() < 0.5:
            self.end(index, handle, LENGTH)
        else:
            self.token(index, handle)

    def token(self, index: int, handle: int, **fields) -> None:
        events = []
        if (index, handle) not in self.began:
            self.began.add((index, handle))
            events = [(handle, EventKind.FIRST_TOKEN, self.clock.now())]
        usage = stats(kv_usage=self.rng.random())
        said = outputs({handle: [1]}, events=events, stats=usage, **fields)
        self.take(self.dispatcher.on_outputs(index, said))

    def work_prefill(self, index: int, leg: AddRequest, fails: bool) -> None:
        if fails:
            self.end(index, leg.handle, self.rng.choice([ERROR, ABORT, LENGTH]))
            return
        ticket = self.ticket(index, len(leg.prompt_token_ids))
        self.minted[ticket.transfer_id] = self.ids[index]
        if leg.kv_send.stream and self.rng.random() < 0.5:
            ready = [KvReady(leg.handle, ticket, False)]
            self.take(self.dispatcher.on_outputs(index, outputs(kv_ready=ready)))
            return
        ready = [KvReady(leg.handle, ticket, True)] * self.rng.randint(1, 2)
        self.end(index, leg.handle, LENGTH, kv_ready=ready)

    def work_load(self, index: int, leg: AddRequest, fails: bool) -> None:
        handle = leg.handle
        streams = leg.kv_receive.ticket is None
        if streams and not fails:
            told = [m for m in self.sent[index] if isinstance(m, KvReady) and m.handle == handle]
            if not told or not told[-1].is_last:
                events = [(handle, EventKind.LOADING, self.clock.now())]
                self.take(self.dispatcher.on_outputs(index, outputs(events=events)))
                return
        if fails:
            received = [KvReceived(handle=handle, error="no route")]
            if self.rng.random() < 0.5:  # the end comes first
                self.end(index, handle, ERROR)
                self.take(self.dispatcher.on_outputs(index, outputs(kv_received=received)))
            else:
                self.end(index, handle, ERROR, kv_received=received)
            return
        received = KvReceived(handle=handle, num_tokens=9, num_bytes=90, ended_s=0.1)
        self.token(index, handle, kv_received=[received])

    def wind_down(self) -> None:
        """From now on all goes well: everything must come to its end."""
        if not self.dispatcher.can_decode:
            self.do_back()
            self.start(max(self.live) + 1, "decode")
        for _ in range(20_000):
            self.flush()
            if not any(self.live.values()):
                break
            self.do_work(well=True)
        self.sleep(0)


@pytest.mark.parametrize("seed", range(200))
def test_random_lives(seed: int):
    world = Fuzz(seed)
    for _ in range(world.rng.randint(20, 250)):
        world.step()
    world.wind_down()
    assert not world.open, "somebody waits for ever"
    assert not any(world.live.values())
    assert max(world.ends.values(), default=1) == 1
    living = {world.ids[e.index] for e in world.dispatcher.fleet if e.state != "gone"}
    for transfer_id, engine_id in world.minted.items():
        count = world.released_ids[transfer_id]
        assert count == 1 if engine_id in living else count <= 1
    world.sleep(1000)
    assert world.dispatcher.next_deadline_s() is None
    world.check_empty()
