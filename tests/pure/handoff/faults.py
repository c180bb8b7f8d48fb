"""Random schedules of faults over two P and two D: none may hang, leak or answer wrongly.

    python -m tests.pure.handoff.faults [--schedules 10000] [--first SEED] [--processes N]

Each seed makes one schedule: settings of the router and of the engines, requests (some of which
share prefixes or names), aborts, preemptions, deaths, restarts under the same address, switches of
roles, forged tickets, and a fault for each load. A schedule passes when every client gets its
answer in time, or an error; when all tokens are those of a run without faults; and when afterwards
every engine has all its blocks, seats and lease slots back. Prints what was tried; exits 1 if any
schedule failed.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from random import Random

import msgspec

from tests.pure.handoff.world import World
from twostroke.kv_messages import KvReady
from twostroke.router.dispatch import DispatchSettings
from twostroke.testing.link_with_faults import Fault

ROLES = (
    ("prefill", "prefill", "decode", "decode"),
    ("prefill", "prefill", "decode", "decode"),
    ("prefill", "both", "decode", "both"),
    ("prefill", "prefill", "prefill", "decode"),
)
ANSWER_S = 400.0  # by then each client must have its answer
QUIET_S = 200.0  # and so much later nothing may be left
FAULTS = [fault for fault in Fault if fault is not Fault.NONE]


class Schedule:
    """One random schedule. `tried` counts what happened in it."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.tried: Counter[str] = Counter()
        self.fault_rate = random.choice((0.0, 0.1, 0.5, 0.9))
        self.forgery_rate = random.choice((0.0, 0.0, 0.2))
        timeout_s = random.choice((2.0, 5.0, 20.0))
        self.world = World(
            DispatchSettings(
                pd_policy=random.choice(("always", "always", "cost")),
                kv_mode=random.choice(("pull", "stream")),
                lease_s=timeout_s * random.choice((0.1, 0.5)),
                handoff_timeout_s=timeout_s,
                max_retries=random.choice((0, 1, 2)),
                recompute_max_tokens=random.choice((None, None, 16)),
                expected_output_tokens=random.choice((1, 16)),
            ),
            step_s=lambda: random.choice((0.002, 0.01, 0.05)),
            read_s=random.choice((0.001, 0.02, 0.1)),
            slow_s=random.choice((0.3, 3.0)),
            fault=self._fault,
        )
        self.world.tamper = self._tampered
        renewal_loss = random.choice((0.0, 0.0, 1.0))
        self.world.loses_renewal = lambda: random.random() < renewal_loss
        self.settings = {
            "num_blocks": random.choice((14, 16, 20, 40)),
            "max_num_seqs": random.choice((2, 4)),
            "max_num_batched_tokens": random.choice((8, 16, 32)),
            "async_scheduling": random.random() < 0.7,
            "enable_prefix_caching": random.random() < 0.7,
            "reserve_output_tokens": random.choice((0, 0, 4)),
            "max_hold_share": random.choice((0.2, 0.5, 1.0)),
            "admission": random.choice(("head", "loads", "backfill")),
        }
        self.roles = random.choice(ROLES)
        for index, role in enumerate(self.roles):
            self.world.start(index, role, **self.settings)
        self._plan()

    def _fault(self) -> Fault:
        if self.random.random() >= self.fault_rate:
            return Fault.NONE
        fault = self.random.choice((*FAULTS, Fault.SLOW, Fault.SLOW))
        self.tried[f"load: {fault.value}"] += 1
        return fault

    def _tampered(self, ready: KvReady) -> KvReady:
        if self.random.random() >= self.forgery_rate:
            return ready
        ticket = ready.ticket
        what = self.random.choice(("id", "slot", "engine"))
        self.tried[f"ticket: {what} forged"] += 1
        if what == "id":
            ticket = msgspec.structs.replace(ticket, transfer_id=self.random.randbytes(16))
        elif what == "slot":
            ticket = msgspec.structs.replace(ticket, lease_slot=ticket.lease_slot + 1)
        else:
            endpoint = msgspec.structs.replace(ticket.endpoint, engine_id="another")
            ticket = msgspec.structs.replace(ticket, endpoint=endpoint)
        return msgspec.structs.replace(ready, ticket=ticket)

    # ------------------------------------------------------------ what happens when

    def _plan(self) -> None:
        random, at = self.random, self.world.network.after
        prefixes = [[random.randrange(1000) for _ in range(24)] for _ in range(2)]
        abort_rate = random.choice((0.1, 0.4))
        for handle in range(1, random.randint(4, 20)):
            prompt = [random.randrange(1000) for _ in range(random.randint(1, 24))]
            if random.random() < 0.4:
                prompt = (random.choice(prefixes)[: random.randint(1, 24)] + prompt)[:40]
            max_tokens = random.randint(1, random.choice((4, 12)))
            name = random.choice(("", "", "same"))
            start_s = random.uniform(0, random.choice((0.1, 1.0, 2.5)))
            at(start_s, lambda h=handle, p=prompt, m=max_tokens, n=name: self._submit(h, p, m, n))
            if random.random() < abort_rate:
                at(start_s + random.uniform(0, 1.0), lambda h=handle: self._abort(h))
        for _ in range(random.choice((0, 0, 1, 5))):
            at(random.uniform(0, 2.5), self._preempt)
        if random.random() < 0.35:
            index = random.randrange(4)
            at(random.uniform(0, 2.5), lambda: self._kill(index))
        if random.random() < 0.15:
            index, role = random.randrange(4), random.choice(("prefill", "decode", "both"))
            at(random.uniform(0, 2.0), lambda: self._switch(index, role))

    def _submit(self, handle: int, prompt: list[int], max_tokens: int, name: str) -> None:
        self.tried["requests"] += 1
        self.world.submit(handle, prompt, max_tokens, name)

    def _abort(self, handle: int) -> None:
        if handle in self.world.prompts:
            self.tried["aborts"] += 1
            self.world.abort(handle)

    def _preempt(self) -> None:
        self.world.engines[self.random.randrange(4)].preempt()

    def _kill(self, index: int) -> None:
        role = self.roles[index]
        self.tried[f"{role} engine killed"] += 1
        notice_s = self.random.choice((0.0, 0.05, 1.0))
        self.world.kill(index, notice_s=notice_s)
        if self.random.random() < 0.5:
            again_s = notice_s + self.random.uniform(0.001, 1.0)
            self.world.network.after(again_s, lambda: self._restart(index))

    def _restart(self, index: int) -> None:
        self.tried["restarts"] += 1
        self.world.start(index, self.roles[index], **self.settings)

    def _switch(self, index: int, role: str) -> None:
        engine = self.world.engines[index]
        if not engine.is_dead:
            self.tried["role switches"] += 1
            self.world.set_role(index, role)

    # ------------------------------------------------------------ the run

    def run(self) -> Counter[str]:
        """Let it happen; AssertionError when something is wrong."""
        world, network = self.world, self.world.network
        network.run(lambda: False, 5.0)  # all that was planned
        is_answered = network.run(lambda: world.is_answered, ANSWER_S)
        assert is_answered, f"hang: {sorted(set(world.prompts) - set(world.ends) - world.left)}"
        network.run(lambda: world.is_quiet and world.dispatcher.num_holds == 0, ANSWER_S + QUIET_S)
        world.check()
        self.tried["errors for clients"] += sum(
            end.error is not None for end in world.ends.values()
        )
        for engine in world.engines.values():
            counts = engine.connector.counts()
            self.tried["leases expired"] += counts.num_expired_leases
            self.tried["loads failed"] += counts.num_failed_loads
            self.tried["unknown names"] += counts.num_unknown_transfers
            self.tried["preemptions"] += engine.core.state.num_preemptions
        counters = world.dispatcher.counters
        self.tried["transfers"] += counters.num_transfers
        self.tried["retries"] += sum(counters.retries.values())
        return self.tried


def run_schedules(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run them all; returns what was tried, and the seeds that failed with the reason."""
    tried: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    for seed in seeds:
        try:
            tried += Schedule(seed).run()
        except Exception:
            failed.append((seed, traceback.format_exc()))
    return tried, failed


def run_in_processes(seeds: range, num: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """The same, shared out over `num` processes."""
    if num == 1:
        return run_schedules(seeds)
    tried: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    shares = [seeds[start : start + 50] for start in range(0, len(seeds), 50)]
    with ProcessPoolExecutor(num) as pool:
        for of_share, failed_of_share in pool.map(run_schedules, shares):
            tried += of_share
            failed += failed_of_share
    return tried, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    start_s = time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.schedules)
    tried, failed = run_in_processes(seeds, arguments.processes)
    for seed, reason in failed[:5]:
        print(f"seed {seed}:\n{reason}")
    for name, count in sorted(tried.items()):
        print(f"{count:9,} {name}")
    seconds = time.monotonic() - start_s
    print(f"{len(seeds):,} schedules in {seconds:.0f} s, {len(failed)} failed")
    print([seed for seed, _ in failed[:50]])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
