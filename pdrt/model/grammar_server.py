"""The process in which xgrammar runs: `python -m pdrt.model.grammar_server`, started by `Grammars`.

Grammars come from clients, and xgrammar is C++ that a small one can send into an endless loop, a
stack overflow or all of the memory: `((a*)*)*` does the first. So every grammar lives in a process
of its own, forked from this one, which has imported xgrammar and read the vocabulary. The kernel
ends it where it exceeds its time or memory, and whoever waits for it sees its socket closed.

Messages are msgspec structs over sockets that keep their boundaries (SOCK_SEQPACKET).
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from pdrt.errors import ModelError, RequestRefused
from pdrt.model.grammar_messages import (
    MESSAGE_BYTES_MAX,
    Advance,
    Fill,
    Mask,
    Ready,
    Refused,
    ServerOptions,
    ToProcess,
    Words,
    end_words,
)
from pdrt.model.tokenizer import Tokenizer
from pdrt.sampling import Grammar, GrammarKind

COMPILE_CPU_SECONDS = 3.0
"""Schemas of 64 KiB that people write take some tenths."""
STEP_CPU_SECONDS = 0.5
"""For one message: a mask takes well under a millisecond, a resumed output of 8192 tokens tens."""
MATCHER_CPU_SECONDS = 0.5
TOKEN_CPU_SECONDS = 0.005
"""What a matcher may use up: so much, and so much for each token. An ambiguous grammar takes longer
with every token; it would slow the steps that others share down without ever reaching the bound of
one step."""
MEMORY_BYTES = 512 * 2**20
"""For one grammar, over what this process has when it forks."""
OOM_SCORE_MAX = 1000
"""The kernel's own bound."""
WHITESPACE_CHARACTERS = 16
"""At most, between two parts of a JSON text: a model that has lost its thread would go on with
newlines until `max_tokens`. Enough for any usual indentation."""
CONTROL = frozenset(range(0x20)) - {0x0A, 0x0D}
NOT_INSTALLED = (
    "structured outputs need xgrammar on this server: pip install 'pdrt[grammar]', or where there "
    "is no GPU, without its 1 GB of triton: pip install pydantic, then pip install --no-deps "
    "xgrammar apache-tvm-ffi"
)


class Compiler:
    """xgrammar with the tokenizer of one model."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Import xgrammar and load the tokenizer; some seconds.

        Raises:
            RequestRefused: xgrammar is not installed.
            ModelError: the tokenizer cannot be loaded.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise RequestRefused(NOT_INSTALLED) from error
        self.ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self.vocab_size = vocab_size
        self._xgrammar: Any = xgrammar
        tokenizer = Tokenizer(directory)
        # The bytes that clients see, not xgrammar's own reading of the vocabulary. Tokens without
        # any (a model may have more rows than its tokenizer has tokens) are never permitted.
        texts = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._tags = self._make(texts)
        # Special tokens are no text: nobody sees them, so they may not stand for any. Only a
        # structural tag may name them.
        special = tokenizer.special_ids
        texts = [b"" if token in special else text for token, text in enumerate(texts)]
        self._text = self._make(texts)
        # In strings of bounded length xgrammar lets raw control characters through, which JSON
        # does not; it can do without tabs elsewhere too.
        self._json = self._make([b"" if CONTROL & set(text) else text for text in texts])

    def _make(self, texts: list[bytes]) -> Any:
        xgrammar = self._xgrammar
        info = xgrammar.TokenizerInfo(
            texts,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=self.ends,
        )
        # Without threads of its own: this process forks. And without a cache: it compiles once.
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Any:
        """Raises RequestRefused where `grammar` is broken or not supported."""
        try:
            return self._compile(grammar)
        # All that xgrammar raises; what is malformed, too large or not supported reads alike.
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise RequestRefused(_in_words(error)) from error

    def _compile(self, grammar: Grammar) -> Any:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._compile_schema(grammar.text)
            case GrammarKind.JSON_OBJECT:
                return self._compile_schema('{"type": "object"}')
            case GrammarKind.REGEX:
                return self._text.compile_regex(grammar.text)
            case GrammarKind.EBNF:
                return self._text.compile_grammar(grammar.text)
            case GrammarKind.STRUCTURAL_TAG:
                return self._tags.compile_structural_tag(grammar.text)

    def _compile_schema(self, schema: str) -> Any:
        return self._json.compile_json_schema(schema, max_whitespace_cnt=WHITESPACE_CHARACTERS)

    def follower(self, compiled: Any) -> Follower:
        """At the beginning of an output."""
        inner = self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=self.ends)
        return Follower(inner, self.ends, self.vocab_size)


def _in_words(error: Exception) -> str:
    """Without the time and the C++ source line that xgrammar puts in front."""
    return re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", str(error)).strip()[:500] or "too large"


class Follower:
    """How far one output has come.

    Once the grammar is complete and an end token has come, only end tokens are permitted: whoever
    ignores them (`ignore_eos`) gets more of them, and nothing else.
    """

    def __init__(self, inner: Any, ends: Sequence[int], vocab_size: int) -> None:
        self._inner = inner
        self._is_over = False
        """Nothing but the end may come; `_inner` is not asked any more."""
        self._ends = end_words(ends, vocab_size)
        self._mask: Words = np.empty((1, len(self._ends)), dtype=np.int32)
        self._budget_seconds = MATCHER_CPU_SECONDS

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens, and find what may follow them."""
        started = time.process_time()
        for token in tokens:
            if self._is_over:
                break
            # Not accepted is a stop token of the client that nobody stopped at.
            accepted = self._inner.accept_token(token)
            self._is_over = not accepted or self._inner.is_terminated()
        if not self._is_over and not self._inner.fill_next_token_bitmask(self._mask, 0):
            self._mask.fill(-1)  # everything is permitted
        used = time.process_time() - started
        self._budget_seconds += len(tokens) * TOKEN_CPU_SECONDS - used

    def permitted(self) -> Words | None:
        """Bitmask of what may come next; None where that takes too long or is nothing at all."""
        if self._is_over:
            return self._ends
        if self._budget_seconds < 0 or not self._mask.any():
            return None
        words: Words = self._mask[0]
        return words


# Processes


def serve_grammar(compiler: Compiler, grammar: Grammar, peer: socket.socket) -> None:
    """Compile one grammar and follow the outputs that it governs, until `peer` is closed."""
    _limit(COMPILE_CPU_SECONDS)
    try:
        compiled = compiler.compile(grammar)
        first = compiler.follower(compiled)
        first.advance(())
        if first.permitted() is None:
            raise RequestRefused("no output can satisfy it")
    except RequestRefused as refused:
        peer.send(msgspec.msgpack.encode(Refused(str(refused))))
        return
    peer.send(msgspec.msgpack.encode(Ready()))
    followers: dict[int, Follower] = {}
    decoder = msgspec.msgpack.Decoder(ToProcess)
    while True:
        _limit(0)
        data = peer.recv(MESSAGE_BYTES_MAX)
        if not data:
            return
        _limit(STEP_CPU_SECONDS)
        match decoder.decode(data):
            case Advance(matcher, tokens, dropped):
                for old in dropped:
                    followers.pop(old, None)
                if matcher not in followers:
                    followers[matcher] = compiler.follower(compiled)
                followers[matcher].advance(tokens)
            case Fill(matcher):
                words = followers[matcher].permitted()
                reply = Mask(b"" if words is None else words.tobytes())
                peer.send(msgspec.msgpack.encode(reply))


def _limit(cpu_seconds: float) -> None:
    """End this process, also out of C++, when it has computed for so long; 0 lifts the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fork_for(compiler: Compiler, control: socket.socket, grammar: Grammar, descriptor: int) -> None:
    """A process for one grammar, which talks over `descriptor`."""
    with socket.socket(fileno=descriptor) as peer:
        if os.fork() != 0:
            return
        _be_grammar(compiler, control, grammar, peer)


def _be_grammar(
    compiler: Compiler, control: socket.socket, grammar: Grammar, peer: socket.socket
) -> NoReturn:
    status = 1
    try:
        control.close()
        _limit_memory()
        # Where the machine's memory ends, these go before the worker does.
        with contextlib.suppress(OSError):  # as on kernels that are none
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_MAX))
        serve_grammar(compiler, grammar, peer)
        status = 0
    finally:
        # Nothing of the parent process may run on in here.
        os._exit(status)


def main(options: ServerOptions, control: socket.socket) -> None:
    """Fork for each grammar that comes, until `control` is closed."""
    # Ctrl-C in a terminal goes to all processes; this one ends with the worker that it serves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets the forked ones by itself
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiler = Compiler(Path(options.directory), options.vocab_size, options.eos_token_ids)
    except (RequestRefused, ModelError) as refused:
        control.send(msgspec.msgpack.encode(Refused(str(refused))))
        return
    try:
        control.send(msgspec.msgpack.encode(Ready()))
    except BrokenPipeError:
        return  # the worker has ended meanwhile
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 1)
        if not data:
            return
        grammar = msgspec.msgpack.decode(data, type=Grammar)
        fork_for(compiler, control, grammar, descriptors[0])


if __name__ == "__main__":
    main(
        msgspec.json.decode(sys.argv[1], type=ServerOptions),
        socket.socket(fileno=int(sys.argv[2])),
    )
    os._exit(0)  # the interpreter would take torch apart, piece by piece
