"""Grammars of outputs, by xgrammar: compiled once per process, then followed token by token.

xgrammar is an extra and takes its time to import: nothing of it is touched before the first
grammar comes, and then on a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pdrt.errors import RequestRefused
from pdrt.model.grammar_limits import check_grammar
from pdrt.model.tokenizer import Tokenizer
from pdrt.sampling import Grammar, GrammarKind

__all__ = ["Compiler", "Grammars", "OutputMatcher", "check_grammar"]

log = logging.getLogger(__name__)

CACHED_MAX = 128
CACHED_BYTES_MAX = 256 * 2**20
"""Compiled grammars kept; one is 0.2 MB to a few MB for a vocabulary of 50,000."""

WHITESPACE_CHARACTERS = 16
"""At most, between two parts of a JSON text: a model that has lost its thread would go on with
newlines until `max_tokens`. Enough for any usual indentation."""

NOT_INSTALLED = (
    "structured outputs need xgrammar on this server: pip install 'pdrt[grammar]', or where there "
    "is no GPU, without its 1 GB of CUDA compilers: pip install --no-deps xgrammar apache-tvm-ffi"
)

Words = np.ndarray[Any, np.dtype[np.int32]]


class Compiled(msgspec.Struct, frozen=True):
    """A grammar for one vocabulary."""

    inner: Any
    """xgrammar's CompiledGrammar; shared by matchers, not changed by them."""
    size_bytes: int


class Compiler:
    """xgrammar with the tokenizer of one model. Made and used by one thread."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Import xgrammar and load the tokenizer; some seconds.

        Raises:
            RequestRefused: xgrammar is not installed, or the model has no end.
            ModelError: the tokenizer cannot be loaded.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise RequestRefused(NOT_INSTALLED) from error
        self.ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
        if not self.ends:
            raise RequestRefused("this model names no end token, so no grammar could ever end")
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
        self._text = self._make([b"" if i in special else text for i, text in enumerate(texts)])

    def _make(self, texts: list[bytes]) -> Any:
        xgrammar = self._xgrammar
        info = xgrammar.TokenizerInfo(
            texts,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=self.ends,
        )
        # One thread, beside the compute; no cache of its own, which would have no bound.
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises RequestRefused where `grammar` is broken, or too large to compile."""
        check_grammar(grammar)
        compiler = self._tags if grammar.kind is GrammarKind.STRUCTURAL_TAG else self._text
        try:
            inner = _compile(compiler, grammar)
        # All that xgrammar raises; what is malformed, too large or not supported reads alike.
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise RequestRefused(_in_words(error)) from error
        return Compiled(inner, inner.memory_size_bytes)

    def matcher(self, compiled: Compiled) -> OutputMatcher:
        """A matcher at the beginning of an output."""
        inner = self._xgrammar.GrammarMatcher(compiled.inner, override_stop_tokens=self.ends)
        return OutputMatcher(inner, self.ends, self.vocab_size)


def _compile(compiler: Any, grammar: Grammar) -> Any:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return compiler.compile_json_schema(
                grammar.text, max_whitespace_cnt=WHITESPACE_CHARACTERS
            )
        case GrammarKind.JSON_OBJECT:
            return compiler.compile_json_schema(
                '{"type": "object"}', max_whitespace_cnt=WHITESPACE_CHARACTERS
            )
        case GrammarKind.REGEX:
            return compiler.compile_regex(grammar.text)
        case GrammarKind.EBNF:
            return compiler.compile_grammar(grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(grammar.text)


def _in_words(error: Exception) -> str:
    """Without the time and the C++ source line that xgrammar puts in front."""
    return re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", str(error)).strip()[:500] or "too large"


class OutputMatcher:
    """Implements `pdrt.model.batch.Matcher`.

    Once the grammar is complete and an end token has come, only end tokens are permitted: whoever
    ignores them (`ignore_eos`) gets more of them, and nothing else.
    """

    def __init__(self, inner: Any, ends: Sequence[int], vocab_size: int) -> None:
        self._inner = inner
        self._taken = 0
        """Output tokens that have been taken in."""
        self._is_over = False
        """Nothing but the end may come; `_inner` is not asked any more."""
        bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
        bits[list(ends)] = True
        self._ends: Words = np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, output_ids: Sequence[int]) -> None:
        """See `Matcher.advance`."""
        assert len(output_ids) >= self._taken, "an output does not become shorter"
        if self._is_over:
            return
        for token in output_ids[self._taken :]:
            if not self._inner.accept_token(int(token)):
                # A stop token of the client, or a flaw of xgrammar: it permitted this token.
                if not self._inner.is_completed():
                    log.error("an output left its grammar", extra={"token": int(token)})
                self._is_over = True
            elif self._inner.is_terminated():
                self._is_over = True
            if self._is_over:
                return
        self._taken = len(output_ids)

    def fill(self, bitmask: Words, row: int) -> None:
        """See `Matcher.fill`; `bitmask` is a numpy array."""
        if not self._is_over:
            # False: everything is permitted.
            if not self._inner.fill_next_token_bitmask(bitmask, row):
                bitmask[row] = -1
            elif not bitmask[row].any():
                log.error("a grammar permits no token: its output ends here")
                self._is_over = True
        if self._is_over:
            bitmask[row] = self._ends


class Grammars:
    """Compiles on a thread of its own; used from the event loop."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._made_from = (directory, vocab_size, eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "pdrt-grammar")
        self._compiler: Compiler | None = None
        """Used by the thread, and by others only for what does not change."""
        # Least recently used first. Refusals too, so that asking again costs nothing. What is
        # not done is never dropped: as many as there are requests.
        self._compiled: OrderedDict[Grammar, Future[Compiled | RequestRefused]] = OrderedDict()

    async def matcher(self, grammar: Grammar, output_ids: Sequence[int] = ()) -> OutputMatcher:
        """A matcher of its own for one request; equal grammars are compiled once.

        Args:
            output_ids: tokens that exist already, where a request is resumed.

        Raises:
            RequestRefused: xgrammar is not installed, or refuses the grammar.
        """
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        # `wait`, as cancelling one who waits must not cancel what others wait for.
        await asyncio.wait([asyncio.wrap_future(future)])
        self._shrink()
        compiled = future.result()
        if isinstance(compiled, RequestRefused):
            raise RequestRefused(str(compiled), compiled.param)
        return await asyncio.wrap_future(self._thread.submit(self._begin, compiled, output_ids))

    def close(self) -> None:
        """Wait for what is being compiled, drop what waits, end the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Compiled | RequestRefused:
        try:
            if self._compiler is None:
                self._compiler = Compiler(*self._made_from)
            return self._compiler.compile(grammar)
        except RequestRefused as refused:
            return refused

    def _begin(self, compiled: Compiled, output_ids: Sequence[int]) -> OutputMatcher:
        assert self._compiler is not None, "something has been compiled"
        matcher = self._compiler.matcher(compiled)
        matcher.advance(output_ids)
        return matcher

    def _shrink(self) -> None:
        """Drop the least recently used until both bounds hold; running requests keep theirs."""
        sizes = {
            grammar: _size_bytes(future.result())
            for grammar, future in self._compiled.items()
            if future.done()
        }
        count, total = len(self._compiled), sum(sizes.values())
        for grammar, size in sizes.items():
            if count <= CACHED_MAX and total <= CACHED_BYTES_MAX:
                return
            del self._compiled[grammar]
            count, total = count - 1, total - size


def _size_bytes(compiled: Compiled | RequestRefused) -> int:
    return compiled.size_bytes if isinstance(compiled, Compiled) else 0
