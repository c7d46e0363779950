"""Every bar with its figure, from the files that the benchmarks wrote.

    python benchmarks/check.py serve.json executor.json control.json gateway.json --peer peer.json

Exit code 1 where a bar falls short, or where its figure is missing or was disturbed. Bars of
benchmarks whose file is not given, and those against the peer without `--peer`, are `not run`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bars import BARS, is_failed, judge, lines
from documents import read

from pdrt.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--peer", type=Path, help="what serve.py wrote of the peer's endpoint")
    options = parser.parse_args()
    try:
        documents = [read(path) for path in options.files]
        peer = None if options.peer is None else read(options.peer)
    except ConfigError as error:
        parser.error(str(error))
    by_name = {document.benchmark: document for document in documents}
    if len(by_name) < len(documents):
        parser.error("two files of one benchmark")
    results = judge(BARS, by_name, peer)
    print("\n".join(lines(results)))
    return int(is_failed(results))


if __name__ == "__main__":
    sys.exit(main())
