"""What senders of all engines have in common: what a segment says, what takes a write, and how
ranges are cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from pdrt.errors import EngineError
from pdrt.ids import Incarnation
from pdrt.protocol.messages import Segment
from pdrt.transfer.engine import ByteRange, WriteRequest


class TakesWrites(Protocol):
    """One generation of one decode incarnation."""

    takes_writes: bool


Instance = TypeVar("Instance", bound=TakesWrites)
Route = TypeVar("Route")


def shown_by(segment: Segment, engine: str, descriptor: Any) -> Any:
    """What a segment of this engine says of itself, as a `descriptor`.

    Raises:
        EngineError: it is another engine's, or malformed.
    """
    if segment.engine != engine:
        raise EngineError(f"decode offers engine {segment.engine!r}, here is {engine!r}")
    try:
        return msgspec.msgpack.decode(segment.descriptor, type=descriptor)
    except msgspec.MsgspecError as error:
        raise EngineError(f"segment of rank {segment.rank} is malformed: {error}") from error


def instance_for(
    instances: Mapping[tuple[Incarnation, int], Instance], request: WriteRequest
) -> Instance:
    """Raises EngineError: there is none, or it takes no new writes."""
    instance = instances.get((request.decode, request.generation))
    if instance is None or not instance.takes_writes:
        raise EngineError(f"generation {request.generation} takes no new writes")
    return instance


def route_for(routes: Mapping[int, Route], request: WriteRequest) -> Route:
    """The way to its decode rank. Raises EngineError: there is none."""
    route = routes.get(request.decode_rank)
    if route is None:
        raise EngineError(f"decode rank {request.decode_rank} has shown no segment")
    return route


def check_inside(ranges: Sequence[ByteRange], source_bytes: int, target_bytes: int) -> None:
    """For engines whose receiver judges nothing. `source_bytes`, `target_bytes`: of the pools.

    Raises:
        EngineError: one lies outside of the peer's.
        AssertionError: or of our own.
    """
    for piece in ranges:
        if not (0 <= piece.target_offset <= target_bytes - piece.length):
            raise EngineError(f"{piece} lies outside of the peer's pool ({target_bytes} bytes)")
        assert 0 <= piece.source_offset <= source_bytes - piece.length, piece


def cut(ranges: Sequence[ByteRange], bytes_max: int) -> Iterator[ByteRange]:
    """The same in parts of at most `bytes_max`, in order."""
    for whole in ranges:
        if 0 < whole.length <= bytes_max:
            yield whole
            continue
        for start in range(0, whole.length, bytes_max):
            yield ByteRange(
                whole.source_offset + start,
                whole.target_offset + start,
                min(bytes_max, whole.length - start),
            )


def batches(
    ranges: Sequence[ByteRange], bytes_max: int, ranges_max: float = math.inf
) -> Iterator[list[ByteRange]]:
    """The same, `cut`, in batches that are filled one after another, in order: of at most
    `bytes_max` together, and so many ranges."""
    batch: list[ByteRange] = []
    length = 0
    for part in cut(ranges, bytes_max):
        if batch and (length + part.length > bytes_max or len(batch) == ranges_max):
            yield batch
            batch, length = [], 0
        batch.append(part)
        length += part.length
    if batch:
        yield batch
