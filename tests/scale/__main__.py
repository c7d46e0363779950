"""`python -m tests.scale`: one deployment of any size, and what it used."""

from __future__ import annotations

import argparse

import msgspec
import uvloop

from tests.scale.scenario import PATIENT, Shape, play


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parser.add_argument("--workers", type=int, default=8, help="of each role")
    parser.add_argument("--hosts", type=int, default=1, help="processes that they share")
    parser.add_argument("--rooms", type=int, default=200, help="at once, and as many clients")
    parser.add_argument("--guests", type=int, default=2, help="that join, die and leave")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds in which nobody asks")
    options = parser.parse_args()
    shape = Shape(
        options.workers,
        options.hosts,
        options.rooms,
        options.guests,
        PATIENT,
        options.idle,
    )
    figures = uvloop.run(play(shape))
    print(msgspec.json.format(msgspec.json.encode(figures)).decode())


if __name__ == "__main__":
    main()
