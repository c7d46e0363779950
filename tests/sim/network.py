"""The control channel: connections that lose, repeat, delay and reconnect; partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdrt.ids import Incarnation
from pdrt.protocol.messages import DecodeToPrefill, PrefillToDecode

if TYPE_CHECKING:
    from tests.sim.decode import DecodeWorker
    from tests.sim.prefill import PrefillWorker
    from tests.sim.world import World

Way = tuple[str, str]
Message = DecodeToPrefill | PrefillToDecode


class Connection:
    """One decode worker's dialled connection to one endpoint. What is under way on an old one
    may arrive after a new one's messages."""

    def __init__(self) -> None:
        self.target: PrefillWorker | None = None
        self.last_there = 0.0
        self.last_back = 0.0

    def reconnect(self) -> None:
        self.target = None
        self.last_there = self.last_back = 0.0


class Network:
    """Delivers in order per connection, except for what faults do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_faulty = True
        self.lost = 0
        self.intercept: Callable[[Message], Message | None] | None = None
        """A directed schedule changes messages here, or loses them."""
        self.aliases: dict[str, str] = {}
        """Endpoints that are dialled under another name too: the newest connection of a routing id
        gets the answers."""
        self.late_until = 0.0
        """When the last message arrives of those that others may overtake."""
        self._blocked: dict[Way, float] = {}

    def block(self, source: str, target: str, seconds: float) -> None:
        """A one-way partition between two slots."""
        self.world.sim.say("net", "%s -/-> %s for %.2f s", source, target, seconds)
        self._blocked[source, target] = self.world.sim.now + seconds

    def heal(self) -> None:
        self.is_faulty = False
        self._blocked.clear()

    def to_prefill(self, decode: DecodeWorker, endpoint: str, message: DecodeToPrefill) -> None:
        connection = decode.connections.get(endpoint)
        if connection is None:
            return
        listeners = self.world.prefill_slots[endpoint].listeners
        if connection.target is None or not connection.target.is_alive:
            connection.reconnect()
            connection.target = listeners[-1] if listeners else None
        target = connection.target
        if target is None or (message := self._changed(message)) is None:
            return
        for delay, in_order in self._arrivals((decode.slot, endpoint)):
            if in_order:
                connection.last_there = max(connection.last_there, self.world.sim.now + delay)
                delay = connection.last_there - self.world.sim.now  # noqa: PLW2901
            else:
                self.late_until = max(self.late_until, self.world.sim.now + delay)
            self.world.sim.after(delay, target.post, target.receive, message)

    def to_decode(
        self, prefill: PrefillWorker, incarnation: Incarnation, message: PrefillToDecode
    ) -> None:
        """Routed by the incarnation in the message."""
        decode = self.world.decodes.get(incarnation)
        if decode is None:
            return
        endpoint = self.aliases.get(prefill.endpoint, prefill.endpoint)
        connection = decode.connections.get(endpoint)
        if connection is None or (message := self._changed(message)) is None:
            return
        for delay, in_order in self._arrivals((prefill.endpoint, decode.slot)):
            if in_order:
                connection.last_back = max(connection.last_back, self.world.sim.now + delay)
                delay = connection.last_back - self.world.sim.now  # noqa: PLW2901
            else:
                self.late_until = max(self.late_until, self.world.sim.now + delay)
            self.world.sim.after(delay, decode.post, decode.receive, endpoint, message)

    def _changed(self, message: Any) -> Any:
        return message if self.intercept is None else self.intercept(message)

    def _arrivals(self, way: Way) -> list[tuple[float, bool]]:
        """When copies of a message arrive, and whether in order; empty when it is lost."""
        sim, rates = self.world.sim, self.world.plan.rates
        delay = 0.002 + sim.rng.random() * 0.02
        if not self.is_faulty:
            return [(delay, True)]
        until = self._blocked.get(way, 0.0)
        if until > sim.now:
            if sim.chance(0.7):
                self.lost += 1
                return []
            # A short outage: the transport resends what it still holds.
            return [(until - sim.now + delay, sim.chance(0.5))]
        if sim.chance(rates.lose):
            self.lost += 1
            return []
        arrivals = [(delay, True)]
        if sim.chance(rates.delay):
            arrivals = [(delay + sim.rng.random() ** 3 * 4.0, False)]
        if sim.chance(rates.duplicate):
            arrivals.append((delay + sim.rng.random() * 2.0, False))
        return arrivals
