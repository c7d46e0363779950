"""One simulated cluster: slots that a supervisor keeps filled, gateways, and the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import slice_plan
from pdrt.kv.pages import OwnerKind
from pdrt.protocol.decode_peers import EngineState
from pdrt.protocol.messages import Fingerprint
from pdrt.protocol.room_writer import RoomWriter
from tests.sim.core import Kind, Simulator, Violation
from tests.sim.decode import DecodeWorker
from tests.sim.fabric import Fabric, Fate, InFlight
from tests.sim.network import Network
from tests.sim.plan import FAULTS_UNTIL_SECONDS, HEAL_SECONDS_MAX, EngineKind, FaultRates, Plan
from tests.sim.prefill import PrefillWorker
from tests.sim.process import Process
from tests.sim.requests import Gateway, Request, RequestState

RESTART_SECONDS = 0.8
DEATH_SEEN_SECONDS = 0.02


class PrefillSlot:
    """A prefill endpoint and whoever listens on it: none, one, or two incarnations."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.endpoint = f"p{index}"
        self.lives = 0
        self.is_gone = False
        """For good."""
        self.unlisted_until = 0.0
        self.listeners: list[PrefillWorker] = []


class DecodeSlot:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lives = 0
        self.is_gone = False
        self.workers: list[DecodeWorker] = []


class World:
    """Everything that one run holds. Faults are put in from outside."""

    def __init__(self, seed: int, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.sim = Simulator(seed, trace)
        self.network = Network(self)
        self.fabric = Fabric(self)
        self.fingerprint = Fingerprint("model", "digest", plan.layout, kv_checksum=plan.kv_checksum)
        self.slices = slice_plan(plan.layout, plan.prefill_ranks, plan.decode_ranks)
        self.healed_rates = FaultRates()
        self.decodes: dict[Incarnation, DecodeWorker] = {}
        self.prefills: dict[Incarnation, PrefillWorker] = {}
        self.requests: list[Request] = []
        self.rooms = self.writes = self.preemptions = self.prompts_here = 0
        self.fences_of_the_dead = 0
        self.direct: Callable[[InFlight], Fate] | None = None
        """What becomes of writes, where a schedule directs them."""
        self.out_of_reach: set[EngineKind] = set()
        """Engines that cannot be opened, where a schedule says so."""
        self.checks_seq = True
        self._lives = 0
        slots = map(PrefillSlot, range(plan.prefill_workers))
        self.prefill_slots = {slot.endpoint: slot for slot in slots}
        self.decode_slots = [DecodeSlot(f"d{i}") for i in range(plan.decode_workers)]
        self.gateways = [Gateway(self, f"g{i}") for i in range(plan.gateways)]
        for prefill_slot in self.prefill_slots.values():
            self.start_prefill(prefill_slot)
        for decode_slot in self.decode_slots:
            self.start_decode(decode_slot)

    @property
    def fences(self) -> int:
        return self.fences_of_the_dead + sum(d.table.fences for d in self.decodes_alive())

    def chance(self, probability: float) -> bool:
        """A fault, as long as there are any."""
        return probability > 0 and self.network.is_faulty and self.sim.chance(probability)

    def some_seconds(self) -> float:
        """How long opening or closing takes: rarely long."""
        return self.sim.rng.random() * 1.5 if self.chance(0.1) else 0.005

    def make_writer(
        self, room: RoomId, page_bytes: Mapping[int, int], pages: Sequence[int], first_page: int
    ) -> RoomWriter:
        return RoomWriter(room, page_bytes, pages, first_page)

    # Supervision

    def start_prefill(self, slot: PrefillSlot) -> None:
        if slot.is_gone:
            return
        self._lives += 1
        slot.lives += 1
        incarnation = Incarnation(0xA000 + self._lives)
        worker = PrefillWorker(self, slot, incarnation)
        self.sim.say(worker.name, "starts as %x", incarnation)
        slot.listeners.append(worker)
        self.prefills[incarnation] = worker

    def move_prefill(self, slot: PrefillSlot) -> None:
        """Its next life will listen on another port."""
        slot.is_gone = True
        slot.unlisted_until = float("inf")
        for worker in list(slot.listeners):
            worker.die("moves to another port")
        successor = PrefillSlot(len(self.prefill_slots))
        self.prefill_slots[successor.endpoint] = successor
        self.sim.after(RESTART_SECONDS, self.start_prefill, successor)

    def start_decode(self, slot: DecodeSlot) -> None:
        if slot.is_gone:
            return
        self._lives += 1
        slot.lives += 1
        incarnation = Incarnation(0xD000 + self._lives)
        worker = DecodeWorker(self, slot, incarnation)
        self.sim.say(worker.name, "starts as %x", incarnation)
        slot.workers.append(worker)
        self.decodes[incarnation] = worker
        worker.post(worker.look_up)

    def listed(self, endpoint: str) -> bool:
        """What gateways say of a prefill endpoint, sooner or later."""
        return self.sim.now >= self.prefill_slots[endpoint].unlisted_until

    def worker_died(self, worker: Process) -> None:
        """A supervisor starts the next incarnation; holders of a pidfd hear of the death."""
        if isinstance(worker, PrefillWorker):
            slot = self.prefill_slots[worker.endpoint]
            slot.listeners.remove(worker)
            del self.prefills[worker.incarnation]
            for decode in self.decodes.values():
                self.sim.after(
                    DEATH_SEEN_SECONDS,
                    decode.post,
                    decode.writer_dead,
                    worker.endpoint,
                    worker.incarnation,
                )
            self.sim.after(RESTART_SECONDS, self.restart_prefill, slot)
        elif isinstance(worker, DecodeWorker):
            decode_slot = next(s for s in self.decode_slots if worker in s.workers)
            decode_slot.workers.remove(worker)
            del self.decodes[worker.incarnation]
            self.fences_of_the_dead += worker.table.fences
            self.sim.after(RESTART_SECONDS, self.restart_decode, decode_slot)

    def restart_prefill(self, slot: PrefillSlot) -> None:
        if not slot.listeners:
            self.start_prefill(slot)

    def restart_decode(self, slot: DecodeSlot) -> None:
        if not slot.workers:
            self.start_decode(slot)

    def kill(self, writer: Incarnation, why: str) -> None:
        """SIGKILL through a pidfd."""
        if writer in self.prefills:
            self.sim.after(0.001, self.prefills[writer].die, f"killed: {why}")

    def is_alive(self, incarnation: Incarnation) -> bool:
        return incarnation in self.prefills

    def decodes_alive(self) -> list[DecodeWorker]:
        return [worker for worker in self.decodes.values() if worker.is_alive]

    def processes(self) -> list[Process]:
        return [*self.decodes.values(), *self.prefills.values()]

    # Load

    def add_request(self, prompt: tuple[int, ...], max_tokens: int) -> Request:
        request = Request(len(self.requests), prompt, max_tokens, self.sim.now)
        self.requests.append(request)
        alive = [g for g in self.gateways if g.is_alive] or self.gateways
        self.sim.rng.choice(alive).ask(request)
        return request

    # The end

    def heal(self) -> None:
        """No more faults; what is broken is mended by whoever would mend it."""
        self.sim.say("world", "heals")
        self.network.heal()
        for slot in self.decode_slots:
            for worker in slot.workers[:-1]:
                worker.die("superseded")
        for prefill_slot in self.prefill_slots.values():
            for prefill in prefill_slot.listeners[:-1]:
                prefill.die("superseded")
        for process in self.processes():
            process.wake()
        for prefill_slot in self.prefill_slots.values():
            prefill_slot.unlisted_until = float("inf") if prefill_slot.is_gone else 0.0

    def run(self) -> None:
        """Faults, healing, liveness."""
        self.sim.run_until(FAULTS_UNTIL_SECONDS)
        self.heal()
        self.run_until_quiet(FAULTS_UNTIL_SECONDS + HEAL_SECONDS_MAX)
        self.probe()

    def probe(self) -> None:
        """A healed cluster serves."""
        if all(slot.is_gone for slot in self.prefill_slots.values()):
            return
        self.gateways.append(Gateway(self, "probe"))
        self.gateways[-1].is_alive = True
        prompts = [(serial, 2, 3, 4, 5, 6) for serial in range(2 * len(self.decode_slots))]
        requests = [self.add_request(prompt, 3) for prompt in prompts]
        self.run_until_quiet(self.sim.now + HEAL_SECONDS_MAX)
        for request in requests:
            if request.state is not RequestState.ANSWERED:
                raise Violation(Kind.LIVENESS, f"a healed cluster fails request {request.serial}")

    def run_until_quiet(self, end: float) -> None:
        while (trouble := self.unfinished()) and self.sim.now < end:
            self.sim.run_until(self.sim.now + 0.5)
        if trouble:
            raise Violation(Kind.LIVENESS, trouble)
        self.sim.run_until(self.sim.now + 1.0)
        self.check_quiet()

    def unfinished(self) -> str | None:
        """What has still to end, in words (I7)."""
        if self.sim.now < self.network.late_until:
            # A dead decode worker's last `Hello` has engines opened for it, and closed again.
            return "messages of the time of faults are still under way"
        for request in self.requests:
            if request.state is RequestState.WAITING:
                return f"request {request.serial} has had no answer"
        for process in self.processes():
            if any(rank.is_hung for rank in process.ranks):
                return f"{process.name} lives on with a hung rank"
        for slot in self.prefill_slots.values():
            if not slot.is_gone and not slot.listeners:
                return f"{slot.endpoint} is down"
        for prefill in self.prefills.values():
            if prefill.scheduler.jobs or prefill.table.rooms:
                return f"{prefill.name}: rooms {list(map(str, prefill.scheduler.jobs))}"
            for known in prefill.table.peers.known.values():
                if any(e.state is not EngineState.OPEN for e in known.engines.values()):
                    return f"{prefill.name}: engines {list(known.engines)} are not settled"
                if known.engines and known.incarnation not in self.decodes:
                    return f"{prefill.name}: engines {list(known.engines)} outlive their decode"
        troubles = (self.unfinished_decode(decode) for decode in self.decodes.values())
        return next(filter(None, troubles), None)

    def unfinished_decode(self, decode: DecodeWorker) -> str | None:
        if decode.scheduler.sequences or decode.scheduler.queue:
            return f"{decode.name}: sequences are still running"
        if decode.table.leases:
            return f"{decode.name}: leases {list(map(str, decode.table.leases))}"
        peers = decode.table.pairing.peers
        for endpoint, slot in self.prefill_slots.items():
            peer = peers.get(endpoint)
            if peer is not None and peer.is_retiring:
                return f"{decode.name}: a generation of {endpoint} is being torn down"
            if slot.is_gone:
                if peer is not None and peer.is_connected:
                    return f"{decode.name}: {endpoint} has gone and is not let go"
            elif peer is None or not peer.is_usable():
                return f"{decode.name}: {endpoint} is not usable: {peer and peer.__dict__}"
        return None

    def check_quiet(self) -> None:
        """Both sides' pools are whole again."""
        for worker in (*self.decodes.values(), *self.prefills.values()):
            worker.check()
            worker.cache.make_room(worker.pages.total)
            counts: dict[OwnerKind, Any] = worker.pages.counts()
            if counts[OwnerKind.FREE] != worker.pages.total:
                raise Violation(Kind.LIVENESS, f"{worker.name}: pages are not free: {counts}")
        for decode in self.decodes.values():
            for peer in decode.table.pairing.peers.values():
                if len(peer.fences) > 1 or len(peer.generations) > 1:
                    raise Violation(Kind.BOUNDS, f"{decode.name}: {peer.fences}")
        for prefill in self.prefills.values():
            for known in prefill.table.peers.known.values():
                if len(known.engines) > 1:
                    raise Violation(Kind.BOUNDS, f"{prefill.name}: {list(known.engines)}")
