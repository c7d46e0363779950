"""`pdrt keygen`: the key that makes processes one cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pdrt.cli.flags import Parser

EPILOG = """\
Give the file to every process of the cluster: --cluster-key FILE on gateway, prefill, decode and
up, or PDRT_CLUSTER_KEY=FILE. How to replace it: docs/operations.md, "Security"."""


def keygen(arguments: Sequence[str]) -> int:
    """0 when there is a new key."""
    from pdrt.transfer.cluster_key import write_new_key

    parser = Parser(
        prog="pdrt keygen",
        description="Draw a cluster key and write it to a new file that only you can read. "
        "Whoever has it is a member of the cluster.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="where to; one that exists is left alone")
    path = parser.parse(arguments)["file"]
    write_new_key(path)
    print(f"{path} holds a new cluster key; start every process with --cluster-key {path}")
    return 0
