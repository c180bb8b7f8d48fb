"""Whatever is asked of an engine, in whatever order, its books balance and it ends up empty."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.handoff.pair import make_pair, prompt_of
from twostroke.kv_messages import KvDisconnect, KvReady, KvRelease, KvRenew, KvTicket
from twostroke.testing.link_with_faults import Fault

LENGTHS = st.integers(1, 40)
P_STEPS = st.one_of(
    st.tuples(st.just("send"), LENGTHS, st.booleans()),
    st.tuples(st.just("add"), LENGTHS),
    st.tuples(st.sampled_from(["abort", "release", "renew", "preempt"]), st.integers(0, 9)),
    st.tuples(st.just("sleep"), st.sampled_from([0.1, 1.0, 3.0])),
    st.tuples(st.just("turn")),
)


class Prefills:
    """P, and what may be done to it."""

    def __init__(self, share: float, *, cached: bool) -> None:
        self.p, _ = make_pair({"max_hold_share": share, "enable_prefix_caching": cached})
        self.share = share
        self.num_added = 0

    def send(self, length: int, stream: bool) -> None:
        self.num_added += 1
        self.p.send(self.num_added, prompt_of(length % 3, length), stream=stream, lease_s=2.0)

    def add(self, length: int) -> None:
        self.num_added += 1
        self.p.add(self.num_added, prompt_of(length % 3, length))

    def abort(self, which: int) -> None:
        self.p.abort(which)

    def release(self, which: int) -> None:
        self.p.tell(KvRelease([it.ticket.transfer_id for it in self.p.ready[which : which + 1]]))

    def renew(self, which: int) -> None:
        self.p.tell(KvRenew([it.ticket.transfer_id for it in self.p.ready[which : which + 1]]))

    def preempt(self, which: int) -> None:
        if self.p.core.state.num_running:
            self.p.preempt()

    def sleep(self, seconds: float) -> None:
        self.p.sleep(seconds)
        self.p.turn()

    def turn(self) -> None:
        self.p.turn()

    def check(self) -> None:
        self.p.core.check_integrity()
        sends = self.p.connector.sends
        let_in = [send for send in sends._sends.values() if send.is_let_in]
        assert sends.num_blocks <= int(self.share * 16) or len(let_in) == 1


@settings(max_examples=150, deadline=None)
@given(st.lists(P_STEPS, max_size=25), st.sampled_from([0.2, 0.5, 1.0]), st.booleans())
def test_prefills_balance_and_keep_the_bound(steps, share, cached):
    prefills = Prefills(share, cached=cached)
    for name, *arguments in steps:
        getattr(prefills, name)(*arguments)
        prefills.check()
    p = prefills.p
    p.run()
    while p.core.next_deadline_s() is not None:
        p.sleep_until_deadline()
        p.run()
    p.check_empty()
    assert p.finished.keys() == set(range(1, prefills.num_added + 1))


D_STEPS = st.one_of(
    st.tuples(st.just("receive"), LENGTHS, st.sampled_from(Fault)),
    st.tuples(st.just("stream"), LENGTHS, st.sampled_from(Fault)),
    st.tuples(st.just("add"), LENGTHS),
    st.tuples(st.sampled_from(["abort", "ready", "preempt"]), st.integers(0, 9)),
    st.tuples(st.just("disconnect")),
    st.tuples(st.just("turn")),
    st.tuples(st.just("sleep"), st.sampled_from([0.1, 1.0])),
)


class Decodes:
    """D, a P that has all prompts, and what may be done to D."""

    def __init__(self, num_blocks: int, *, cached: bool) -> None:
        self.faults: list[Fault] = []
        self.p, self.d = make_pair(
            {"num_blocks": 400, "enable_prefix_caching": False},
            {"num_blocks": num_blocks, "quarantine_s": 0.5, "enable_prefix_caching": cached},
            fault=lambda: self.faults.pop(0) if self.faults else Fault.NONE,
            slow_s=0.2,
        )
        self.prompts: dict[int, list[int]] = {}
        self.streams: list[int] = []
        self.loads: list[int] = []

    def _prompt(self, length: int) -> tuple[int, list[int]]:
        handle = len(self.prompts) + 1
        self.prompts[handle] = prompt_of(length % 3, length)
        return handle, self.prompts[handle]

    def _load(self, length: int, fault: Fault, ticket: KvTicket | None) -> int:
        handle, prompt = self._prompt(length)
        self.faults.append(fault)
        self.loads.append(handle)
        self.d.receive(handle, prompt, ticket, timeout_s=1.0)
        return handle

    def _ticket(self, length: int) -> KvTicket:
        handle = len(self.p.finished) + 1
        return self.p.ticket_for(handle, prompt_of(length % 3, length), lease_s=1e6)

    def receive(self, length: int, fault: Fault) -> None:
        self._load(length, fault, self._ticket(length))

    def stream(self, length: int, fault: Fault) -> None:
        self.streams.append(self._load(length, fault, None))

    def ready(self, which: int) -> None:
        for handle in self.streams[which : which + 1]:
            ticket = self._ticket(len(self.prompts[handle]))
            self.d.tell(KvReady(handle, ticket, is_last=True))

    def add(self, length: int) -> None:
        handle, prompt = self._prompt(length)
        self.d.add(handle, prompt)

    def abort(self, which: int) -> None:
        self.d.abort(which)

    def preempt(self, which: int) -> None:
        if self.d.core.state.num_running:
            self.d.preempt()

    def disconnect(self) -> None:
        self.d.tell(KvDisconnect("p"))

    def turn(self) -> None:
        self.d.turn()

    def sleep(self, seconds: float) -> None:
        self.d.sleep(seconds)
        self.d.turn()


@settings(max_examples=100, deadline=None)
@given(st.lists(D_STEPS, max_size=20), st.sampled_from([12, 17, 30]), st.booleans())
def test_decodes_balance_and_answer_rightly(steps, num_blocks, cached):
    decodes = Decodes(num_blocks, cached=cached)
    d = decodes.d
    for name, *arguments in steps:
        getattr(decodes, name)(*arguments)
        d.core.check_integrity()
    d.run()
    while d.core.next_deadline_s() is not None:
        d.sleep_until_deadline()
        d.run()
    d.check_empty()
    assert d.finished.keys() == decodes.prompts.keys()
    for handle, end in d.finished.items():
        if end.error is None and end.reason.name == "LENGTH":
            d.check_answer(handle, decodes.prompts[handle])
    assert sorted(it.handle for it in d.received) == decodes.loads
