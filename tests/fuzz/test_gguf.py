"""GGUF files, cut short and damaged: a ModelError that says so, or a header that holds together."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from pdrt.errors import ModelError
from pdrt.model.fetch import resolve_model
from pdrt.model.gguf_header import check_gguf
from tests.fuzz.effort import Fuzz, efforts
from tests.fuzz.hostile import INTEGERS, scrambled


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_rope_freq_base(10_000.0)
    writer.add_token_list(["<s>", "a", "ä" * 10])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.ones((3, 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_whole_file_passes(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    check_gguf(path)


def test_every_cut_is_told(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    data = len(data_of(whole, tmp_path))
    for end in [*range(0, len(whole) - data, 7), len(whole) - data // 2]:
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"cannot read .*model.gguf: "):
            check_gguf(path)


def data_of(whole: bytes, folder: Path) -> bytes:
    """What follows the header, padding left out."""
    path = folder / "whole.gguf"
    path.write_bytes(whole)
    first = min(tensor.data_offset for tensor in GGUFReader(str(path)).tensors)
    return whole[first : first + 3 * 8 * 4 + 8 * 2]


@efforts(150)
def test_damaged_headers(tmp_path: Path, whole: bytes, fuzz: Fuzz) -> None:
    """Whatever passes is for the reader, which runs in a process of its own with bounded memory."""
    path = tmp_path / "model.gguf"

    def refused_or_readable(random: Random) -> None:
        content = bytearray(scrambled(random, whole) if random.random() < 0.5 else whole)
        if len(content) > 32:
            place = random.randrange(0, len(content) - 8)
            number = struct.pack("<Q", random.choice(INTEGERS) % 2**64)
            content[place : place + 8] = number[: random.choice([1, 4, 8])]
        path.write_bytes(content)
        try:
            check_gguf(path)
        except ModelError as error:
            assert "\n" not in str(error)

    fuzz(refused_or_readable)


def header(tensors: int, keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def named(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(100),
        header(0, 0, version=1),
        header(0, 0, version=0x03000000),
        header(2**63, 0),
        header(0, 2**64 - 1),
        header(0, 1, struct.pack("<Q", 2**63)),
        header(0, 1, named(b"a", 99, b"")),
        header(0, 1, named(b"a", 8, struct.pack("<Q", 2**64 - 1))),
        header(0, 1, named(b"a", 9, struct.pack("<IQ", 4, 2**62))),
        header(0, 1, named(b"a", 9, struct.pack("<IQ", 8, 2**62))),
        header(0, 1, named(b"a", 9, struct.pack("<IQ", 9, 1) * 100)),
        header(0, 1, named(b"general.alignment", 4, struct.pack("<I", 0))),
        header(1, 0, named(b"t", 2**32 - 1, b"")),
        header(1, 0, named(b"t", 2, struct.pack("<QQIQ", 2**62, 2**62, 0, 0))),
        header(1, 0, named(b"t", 1, struct.pack("<QIQ", 8, 0, 2**63))),
        header(1, 0, named(b"t", 1, struct.pack("<QIQ", 8, 12345, 0))),
    ],
    ids=lambda content: str(len(content)),
)
def test_headers_that_promise_too_much(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read .*model.gguf: "):
        check_gguf(path)
    with pytest.raises(ModelError, match=r"cannot read .*model.gguf: "):
        resolve_model(str(path), lambda text: None, tmp_path / "cache")
