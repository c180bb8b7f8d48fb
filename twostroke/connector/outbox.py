"""What the two strokes of a hand-off have to say until somebody takes it."""

from dataclasses import dataclass, field

from twostroke.connector.base import KvEnds, KvOutputs
from twostroke.kv_messages import KvCommands


@dataclass(slots=True)
class Outbox:
    """To the worker's half, to the core and to the router; whoever takes a part empties it."""

    commands: KvCommands = field(default_factory=KvCommands)
    ends: KvEnds = field(default_factory=KvEnds)
    outputs: KvOutputs = field(default_factory=KvOutputs)

    @property
    def has_commands(self) -> bool:
        told = self.commands
        return bool(told.leases or told.loads or told.given_up or told.connects or told.disconnects)

    @property
    def has_ends(self) -> bool:
        return bool(self.ends.loaded or self.ends.failed or self.ends.freed)

    @property
    def has_outputs(self) -> bool:
        return bool(self.outputs.ready or self.outputs.received or self.outputs.links)


class RecentIds:
    """The transfers that ended last: who names one of them is late, not a stranger."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._ids: dict[bytes, None] = {}

    def add(self, transfer_id: bytes) -> None:
        self._ids[transfer_id] = None
        if len(self._ids) > self._size:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._ids
