"""A rank of a prefill worker that is not its leader, in a process of its own."""

from __future__ import annotations

import logging
import socket
from typing import NoReturn, Protocol

import uvloop

from pdrt.config import WorkerConfig
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.model.collectives import RankPlace
from pdrt.model.rank_executor import RankExecutor
from pdrt.model.steady import steady
from pdrt.prefill.rank import PrefillRank, ToPrefillRank, prefill_parts
from pdrt.transfer.rank_loop import RankLoop, TakesPart
from pdrt.transfer.worker_loop import ExitCode, exit_now

log = logging.getLogger(__name__)


class Computes(TakesPart, Protocol):
    """The executor of such a rank."""

    layout: KvLayout
    pool: KvPool


def run(config: WorkerConfig, place: RankPlace, end: socket.socket) -> NoReturn:
    """Load this rank's part of the model, and serve the leader at the other end of the channel as
    long as it is there.

    Raises:
        PdrtError: the configuration or the model cannot be used, or another rank is lost.
    """
    executor = RankExecutor.load(config.model, config.device, log.info, place)
    steady(executor.pool, config.device)
    exit_now(uvloop.run(serve(config, place, executor, end)))


async def serve(
    config: WorkerConfig, place: RankPlace, executor: Computes, end: socket.socket
) -> ExitCode:
    """On the loop of this process."""
    frame = RankLoop(end, ToPrefillRank, config.protocol.hello_interval_seconds)
    parts = prefill_parts(place.rank, place.ranks, config, executor.layout, executor.pool)
    rank = PrefillRank(parts, config.protocol.inbox_max, frame.loop.start, frame.answer)
    return await frame.run(rank, executor)
