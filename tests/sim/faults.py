"""Where faults come from: load with aborts, and crashes, stalls and partitions at random times."""

from __future__ import annotations

from pdrt.protocol.messages import Reason
from tests.sim.plan import CONFIG, FAULTS_UNTIL_SECONDS, PAGE_SIZE
from tests.sim.requests import Request
from tests.sim.world import PrefillSlot, World


def add_load(world: World) -> None:
    """Requests with shared prefixes, some aborted, some moved to another decode worker."""
    rng = world.sim.rng
    prefixes = [tuple(rng.randrange(1000) for _ in range(PAGE_SIZE * 4)) for _ in range(2)]
    for _ in range(world.plan.requests):
        prefix = rng.choice(prefixes)[: rng.choice((0, 0, 4, 8, 16))]
        prompt = prefix + tuple(rng.randrange(1000) for _ in range(rng.randint(1, 14)))
        max_tokens = rng.choice((0, 1, 2, 3, 5, 8, 8, 12))
        at = rng.random() * (FAULTS_UNTIL_SECONDS - 1.0)
        world.sim.after(at, ask, world, prompt, max_tokens)


def ask(world: World, prompt: tuple[int, ...], max_tokens: int) -> None:
    request = world.add_request(prompt, max_tokens)
    if world.sim.chance(world.plan.rates.abort):
        # Early enough to strike every step of a hand-over.
        seconds = world.sim.rng.random() ** 2 * 2.0
        world.sim.after(seconds, disturb, world, request)


def disturb(world: World, request: Request) -> None:
    gateway = next((g for g in world.gateways if request in g.requests), None)
    if gateway is not None and gateway.is_alive:
        if world.sim.chance(0.3):
            gateway.move(request)
        else:
            gateway.abort(request)


def add_faults(world: World) -> None:
    rng = world.sim.rng
    kinds = (
        crash_prefill,
        crash_prefill,
        crash_decode,
        two_prefill_incarnations,
        two_decode_incarnations,
        stall,
        stall,
        backlog,
        sleep_together,
        hang_rank,
        hang_rank,
        kill_rank,
        partition,
        partition,
        reconnect,
        reconnect,
        leave_for_good,
        leave_gracefully,
        move,
        lose_task,
        end_room,
        vanish,
        flap,
    )
    for _ in range(world.plan.faults):
        at = 0.2 + rng.random() * (FAULTS_UNTIL_SECONDS - 0.5)
        world.sim.after(at, rng.choice(kinds), world)


def add_short_stalls(world: World) -> None:
    """Below every bound: nobody may notice."""
    rng = world.sim.rng
    for _ in range(8):
        at = 0.2 + rng.random() * (FAULTS_UNTIL_SECONDS - 0.5)
        world.sim.after(at, rng.choice((stall_shortly, backlog)), world)


def crash_prefill(world: World) -> None:
    if world.prefills:
        world.sim.rng.choice(list(world.prefills.values())).die("crash")


def crash_decode(world: World) -> None:
    if world.decodes:
        world.sim.rng.choice(list(world.decodes.values())).die("crash")


def two_prefill_incarnations(world: World) -> None:
    """A new one listens on the endpoint while the old one lives."""
    slot = world.sim.rng.choice(list(world.prefill_slots.values()))
    if len(slot.listeners) == 1:
        world.start_prefill(slot)
        for _ in range(world.sim.rng.randint(1, 3)):
            world.sim.after(world.sim.rng.random() * 4.0, switch_listener, world, slot.endpoint)


def switch_listener(world: World, endpoint: str) -> None:
    """The next connection is answered by the other incarnation."""
    slot = world.prefill_slots[endpoint]
    slot.listeners.reverse()
    for decode in world.decodes.values():
        if connection := decode.connections.get(endpoint):
            connection.reconnect()


def two_decode_incarnations(world: World) -> None:
    slot = world.sim.rng.choice(world.decode_slots)
    if len(slot.workers) == 1:
        world.start_decode(slot)


def stall(world: World) -> None:
    if processes := world.processes():
        world.sim.rng.choice(processes).stall(world.sim.rng.choice((0.4, 1.0, 3.0, 6.0)))


def stall_shortly(world: World) -> None:
    if processes := world.processes():
        world.sim.rng.choice(processes).stall(0.2 + world.sim.rng.random() * 0.7)


def sleep_together(world: World) -> None:
    """The whole machine is suspended."""
    seconds = world.sim.rng.choice((1.0, 4.0, 8.0))
    for process in world.processes():
        process.stall(seconds)


def backlog(world: World) -> None:
    if processes := world.processes():
        world.sim.rng.choice(processes).backlog(world.sim.rng.random() * 4.0)


def hang_rank(world: World) -> None:
    """One rank under a living leader: for a while, or until its worker ends."""
    if processes := [process for process in world.processes() if len(process.ranks) > 1]:
        process = world.sim.rng.choice(processes)
        rank = world.sim.rng.choice(process.ranks[1:])
        world.sim.say(process.name, "rank %d hangs", rank.index)
        rank.is_hung = True
        if world.sim.chance(0.3):
            world.sim.after(world.sim.rng.random() * 2.0, rank.wake)


def kill_rank(world: World) -> None:
    """A worker lives and dies as one."""
    if processes := world.processes():
        process = world.sim.rng.choice(processes)
        process.rank_died(world.sim.rng.choice(process.ranks))


def partition(world: World) -> None:
    """One way or both, between one pair or from one slot to all."""
    rng = world.sim.rng
    decode = rng.choice(world.decode_slots).name
    for endpoint in rng.choice(
        (list(world.prefill_slots), [rng.choice(list(world.prefill_slots))])
    ):
        seconds = rng.random() * 5.0
        ways = rng.choice((1, 2, 3))
        if ways & 1:
            world.network.block(decode, endpoint, seconds)
        if ways & 2:
            world.network.block(endpoint, decode, seconds)


def reconnect(world: World) -> None:
    for decode in world.decodes.values():
        for connection in decode.connections.values():
            if world.sim.chance(0.5):
                connection.reconnect()


def leave_for_good(world: World) -> None:
    """Its supervisor gives up; gateways delist it, perhaps late."""
    slot = world.sim.rng.choice(list(world.prefill_slots.values()))
    slot.is_gone = True
    for worker in list(slot.listeners):
        worker.die("leaves for good")
    world.sim.after(world.sim.rng.random() * 4.0, delist, slot)


def delist(slot: PrefillSlot) -> None:
    slot.unlisted_until = float("inf")


def move(world: World) -> None:
    """Its next life has another endpoint; the table of endpoints fills with old ones."""
    slots = [slot for slot in world.prefill_slots.values() if not slot.is_gone]
    if slots:
        world.move_prefill(world.sim.rng.choice(slots))


def leave_gracefully(world: World) -> None:
    """Shutdown: nothing new, what runs is finished, then it ends."""
    if world.prefills:
        worker = world.sim.rng.choice(list(world.prefills.values()))
        worker.post(worker.table.leave)


def lose_task(world: World) -> None:
    if world.prefills:
        worker = world.sim.rng.choice(list(world.prefills.values()))
        rank = world.sim.rng.choice(worker.ranks)
        if rank.writers:
            room = world.sim.rng.choice(list(rank.writers))
            world.sim.say(worker.name, "rank %d loses the task of %s", rank.index, room)
            rank.post(rank.lose_task, room)


def end_room(world: World) -> None:
    """Of the prefill worker's own accord."""
    if world.prefills:
        worker = world.sim.rng.choice(list(world.prefills.values()))
        for room in list(worker.table.rooms)[:2]:
            worker.post(worker.end_room, room, Reason.OVERLOADED)


def vanish(world: World) -> None:
    gateway = world.sim.rng.choice(world.gateways)
    if world.sim.chance(0.5):
        world.sim.say(gateway.name, "vanishes")
        gateway.vanish()


def flap(world: World) -> None:
    """An endpoint is unwanted, and wanted again."""
    slot = world.sim.rng.choice(list(world.prefill_slots.values()))
    seconds = world.sim.rng.random() ** 2 * 2 * CONFIG.silence_seconds
    slot.unlisted_until = max(slot.unlisted_until, world.sim.now + seconds)
