"""Flags of `pdrt bench`, and what they ask for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pdrt.cli.bench.client import Target, parse_target
from pdrt.cli.bench.load import Load
from pdrt.cli.bench.summary import Slo
from pdrt.cli.flags import KNOWN_KEYS, Parser
from pdrt.cli.http import get_json
from pdrt.cli.load import layer_from_environment
from pdrt.errors import ConfigError, PdrtError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONCURRENCY = (1, 8)

POSITIVE = (
    "requests",
    "output_tokens",
    "concurrency",
    "rate",
    "prompt_tokens",
    "timeout",
    "slo_ttft_ms",
    "slo_itl_ms",
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The command line, in order."""

    target: Target
    model: str
    loads: tuple[Load, ...]
    requests: int
    """Of each row; a closed loop has two per client at least."""
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    vocabulary: int
    ignore_eos: bool
    warmup: int
    slo: Slo
    server: tuple[str, ...]
    """Its processes, as `cpu_times` takes them."""
    seed: int


def parser() -> Parser:
    """Flags of `pdrt bench`."""
    made = Parser(
        prog="pdrt bench",
        description="TTFT, ITL, TPOT, throughput and goodput of an OpenAI-compatible endpoint, of "
        "pdrt or another. A row per load and prompt length. Exit code 1 if a request failed.",
        epilog="PDRT_URL and PDRT_API_KEY in the environment stand in for the flags.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--url", metavar="TEXT", help=f"the endpoint, with or without /v1 (default: {DEFAULT_URL})")
    add("--api-key", metavar="TEXT", help="sent as a bearer token")
    add("--model", metavar="TEXT", help="default: the first that the endpoint names")
    add(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="completions sends random token ids, chat random words",
    )
    add(
        "--concurrency",
        metavar="INT",
        type=int,
        nargs="+",
        help="closed loop: so many clients, each with one request at a time (default: 1 8)",
    )
    add(
        "--rate",
        metavar="NUMBER",
        type=float,
        nargs="+",
        help="open loop: so many requests a second, at random times (Poisson)",
    )
    add("--requests", metavar="INT", type=int, default=32, help="of each row (default: 32)")
    add("--prompt-tokens", metavar="INT", type=int, nargs="+", default=[256])
    add("--output-tokens", metavar="INT", type=int, default=64)
    add("--vocabulary", metavar="INT", type=int, default=10_000, help="token ids are below this")
    add(
        "--respect-eos",
        action="store_true",
        help="let the model end early; else ignore_eos is sent, which not every endpoint knows",
    )
    add(
        "--warmup", metavar="INT", type=int, default=2, help="requests before each row, not counted"
    )
    add("--slo-ttft-ms", metavar="NUMBER", type=float, help="goodput: TTFT of a good request")
    add("--slo-itl-ms", metavar="NUMBER", type=float, help="goodput: its mean time between tokens")
    add("--timeout", metavar="NUMBER", type=float, default=600.0, help="seconds of one request")
    add(
        "--server",
        metavar="TEXT",
        nargs="+",
        default=["pdrt"],
        help="the server's processes, to tell their processor time from others': process ids, or "
        "text in command lines; their children count too (default: pdrt)",
    )
    add("--seed", metavar="INT", type=int, default=0)
    add("--json", metavar="FILE", help="write the rows here")
    return made


def settings_of(flags: Mapping[str, Any]) -> Settings:
    """Checked. Asks the endpoint for its model if none is named.

    Raises:
        PdrtError: a flag is out of range, or the endpoint names no model.
    """
    layer_from_environment({}, KNOWN_KEYS, os.environ)  # refuses misspelt variables
    for name in POSITIVE:
        given = flags[name] if isinstance(flags[name], list) else [flags[name]]
        if not all(value is None or 0 < value < 1e9 for value in given):
            raise ConfigError(f"--{name.replace('_', '-')}: above 0")
    if flags["vocabulary"] < 200 or flags["warmup"] < 0:
        raise ConfigError("--vocabulary: 200 at least; --warmup: 0 at least")
    if flags["concurrency"] and flags["rate"]:
        raise ConfigError("--concurrency and --rate exclude each other: run twice")
    url = flags["url"] or os.environ.get("PDRT_URL") or DEFAULT_URL
    api_key = flags["api_key"] or os.environ.get("PDRT_API_KEY") or None
    kind: Literal["completions", "chat"] = flags["api"]
    target = parse_target(url, api_key, kind, flags["timeout"])
    return Settings(
        target=target,
        model=flags["model"] or _first_model(target),
        loads=_loads(flags),
        requests=flags["requests"],
        prompt_tokens=tuple(flags["prompt_tokens"]),
        output_tokens=flags["output_tokens"],
        vocabulary=flags["vocabulary"],
        ignore_eos=not flags["respect_eos"],
        warmup=flags["warmup"],
        slo=Slo(_seconds(flags["slo_ttft_ms"]), _seconds(flags["slo_itl_ms"])),
        server=tuple(flags["server"]),
        seed=flags["seed"],
    )


def _loads(flags: Mapping[str, Any]) -> tuple[Load, ...]:
    if flags["rate"]:
        return tuple(Load(rate=rate) for rate in flags["rate"])
    counts = flags["concurrency"] or DEFAULT_CONCURRENCY
    return tuple(Load(concurrency=count) for count in counts)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _first_model(target: Target) -> str:
    scheme = "https" if target.is_https else "http"
    url = f"{scheme}://{target.host}:{target.port}{target.path}/models"
    try:
        answer = get_json(url, target.api_key, timeout_seconds=10.0)
    except OSError as error:
        raise PdrtError(f"nothing answers at {url} ({error}); name it with --url") from error
    try:
        return str(answer.body["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        hint = "give --api-key" if answer.status in (401, 403) else "name one with --model"
        raise PdrtError(f"{url} answered {answer.status} and named no model; {hint}") from error
