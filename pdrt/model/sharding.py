"""How the ranks of a worker share the weights of a model. Pure: names, shapes and ranges.

The split is Megatron's (Shoeybi et al. 2019, "Megatron-LM"): what makes queries, keys, values and
the wide middle of an MLP is split by its outputs, what takes them by its inputs, so that one sum
over the ranks ends attention, and one the MLP. Norms, routers and the embedding are on every rank,
the head is split by vocabulary. Query heads divide evenly over the ranks, KV heads lie as
`pdrt.kv.layout.rank_heads` says. The middle of an MLP may divide unevenly.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from pdrt.errors import ModelError
from pdrt.kv.layout import HeadRange, rank_heads

SPLIT_TYPES = frozenset({
    "apertus", "arcee", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "granite", "llama", "ministral", "ministral3", "mistral", "mixtral", "olmo",
    "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
    "vaultgemma",
})  # fmt: skip
"""Values of `model_type` that tests/model/test_tensor_parallel.py compares with one rank."""


class Unit(Enum):
    """What one side of a matrix counts, and by what it is therefore divided."""

    QUERY = "query heads"
    KEY_VALUE = "KV heads"
    WIDTH = "the middle of an MLP"


class Side(Enum):
    """Which side of a linear layer is divided."""

    OUTPUTS = 0
    """Each rank computes some outputs; its bias goes with them."""
    INPUTS = 1
    """Each rank computes a part of every output, to be summed; one rank adds the bias."""


WEIGHTS: Mapping[str, tuple[Side, tuple[Unit, ...]]] = {
    "q_proj": (Side.OUTPUTS, (Unit.QUERY,)),
    "k_proj": (Side.OUTPUTS, (Unit.KEY_VALUE,)),
    "v_proj": (Side.OUTPUTS, (Unit.KEY_VALUE,)),
    "qkv_proj": (Side.OUTPUTS, (Unit.QUERY, Unit.KEY_VALUE, Unit.KEY_VALUE)),
    "o_proj": (Side.INPUTS, (Unit.QUERY,)),
    "dense": (Side.INPUTS, (Unit.QUERY,)),
    "gate_proj": (Side.OUTPUTS, (Unit.WIDTH,)),
    "up_proj": (Side.OUTPUTS, (Unit.WIDTH,)),
    "gate_up_proj": (Side.OUTPUTS, (Unit.WIDTH, Unit.WIDTH)),
    "down_proj": (Side.INPUTS, (Unit.WIDTH,)),
    "fc1": (Side.OUTPUTS, (Unit.WIDTH,)),
    "fc2": (Side.INPUTS, (Unit.WIDTH,)),
    "c_fc": (Side.OUTPUTS, (Unit.WIDTH,)),
    "c_proj": (Side.INPUTS, (Unit.WIDTH,)),
    "w1": (Side.OUTPUTS, (Unit.WIDTH,)),
    "w3": (Side.OUTPUTS, (Unit.WIDTH,)),
    "w2": (Side.INPUTS, (Unit.WIDTH,)),
}
"""By the name of the layer that a tensor belongs to, in checkpoints and in transformers' modules;
everything else is on every rank."""

WIDTH_KEYS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Keys of a configuration that `Unit.WIDTH` counts."""


class Shard(msgspec.Struct, frozen=True):
    """One rank's part of a model."""

    rank: int
    ranks: int
    heads: int
    """Query heads of the whole model, and so are KV heads."""
    kv_heads: int
    head_dim: int

    @property
    def queries(self) -> HeadRange:
        count = self.heads // self.ranks
        return HeadRange(self.rank * count, count)

    @property
    def keys(self) -> HeadRange:
        return rank_heads(self.kv_heads, self.ranks)[self.rank]


class Part(msgspec.Struct, frozen=True):
    """What one rank keeps of a tensor: ranges of one dimension, one after another."""

    dimension: int
    ranges: tuple[tuple[int, int], ...]
    """First and end of each."""


class OnRankZero(msgspec.Struct, frozen=True):
    """The bias of a sum over ranks: rank 0 adds it, the others add zeros."""


def check_split(config: Mapping[str, Any], ranks: int, quantization: str | None) -> None:
    """Refuse, by its config.json, a model that several ranks cannot share.

    Args:
        quantization: how its weights are quantized, or are to be.

    Raises:
        ModelError: names what does not fit, both values, and what would.
    """
    if ranks == 1:
        return
    asked = _asked(ranks)
    if quantization is not None:
        raise ModelError(
            f"{asked}: weights quantized with {quantization} cannot be split over ranks; take the "
            "model without quantization, or --tensor-parallel-size 1"
        )
    model_type = config.get("model_type")
    if model_type not in SPLIT_TYPES:
        raise ModelError(
            f"{asked}: model_type {model_type!r} cannot be split over ranks; those that can are "
            f"{', '.join(sorted(SPLIT_TYPES))}"
        )


def shard_of(config: Any, rank: int, ranks: int) -> Shard:
    """A rank's part of the model of a transformers configuration.

    Raises:
        ModelError: its heads do not divide; names both numbers, and the sizes that would do.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not _divides(heads, kv_heads, ranks):
        sizes = [str(n) for n in range(1, heads + 1) if _divides(heads, kv_heads, n)]
        raise ModelError(
            f"{_asked(ranks)}: {heads} attention heads and {kv_heads} KV heads do not divide over "
            f"{ranks}; sizes that do are {', '.join(sizes)}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shard(rank, ranks, heads, kv_heads, head_dim)


def _asked(ranks: int) -> str:
    return f"{ranks} ranks (--tensor-parallel-size, or one on each device of --gpus)"


def _divides(heads: int, kv_heads: int, ranks: int) -> bool:
    return heads % ranks == 0 and max(kv_heads, ranks) % min(kv_heads, ranks) == 0


def local_config(config: Any, shard: Shard) -> Any:
    """The transformers configuration of a module that holds a rank's part of each layer. Its head
    is whole: see `pdrt.model.shard_weights`."""
    local = copy.deepcopy(config)
    local.head_dim = shard.head_dim
    local.num_attention_heads = shard.queries.count
    local.num_key_value_heads = shard.keys.count
    for key in WIDTH_KEYS:
        if isinstance(width := getattr(local, key, None), int):
            first, end = share(width, shard.rank, shard.ranks)
            setattr(local, key, end - first)
    return local


def share(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """First and end of a rank's part of `length` things; parts differ by one at most."""
    return length * rank // ranks, length * (rank + 1) // ranks


def part_of(shard: Shard, name: str, shape: Sequence[int]) -> Part | OnRankZero | None:
    """What a rank keeps of the tensor called `name`; None for all of it.

    Args:
        shape: of the whole tensor: (outputs, inputs), of several experts (experts, outputs,
            inputs), of a bias (outputs,).

    Raises:
        ModelError: a norm over all heads at once, of which no rank has all.
    """
    *_, layer, last = ("", *name.split("."))
    is_bias = last == "bias"
    # The experts of a module are a parameter of their own; otherwise a tensor is a layer's weight.
    layer = layer if last in {"weight", "bias"} else last
    if layer in {"q_norm", "k_norm"} and tuple(shape) != (shard.head_dim,):
        raise ModelError(f"{name} spans all heads, and cannot be split over ranks")
    if layer not in WEIGHTS:
        return None
    side, units = WEIGHTS[layer]
    if is_bias and side is Side.INPUTS:
        return OnRankZero()
    dimension = 0 if is_bias else len(shape) - 2 + side.value
    return Part(dimension, _ranges(shard, units, shape[dimension]))


def _ranges(shard: Shard, units: Sequence[Unit], length: int) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    at = 0
    for unit in units:
        match unit:
            case Unit.QUERY:
                total, first, end = _of_heads(shard, shard.heads, shard.queries)
            case Unit.KEY_VALUE:
                total, first, end = _of_heads(shard, shard.kv_heads, shard.keys)
            case Unit.WIDTH:
                total = length // len(units)
                first, end = share(total, shard.rank, shard.ranks)
        ranges.append((at + first, at + end))
        at += total
    if at != length:
        raise ModelError(f"a weight of {length} elements where {at} are expected")
    return tuple(ranges)


def _of_heads(shard: Shard, heads: int, held: HeadRange) -> tuple[int, int, int]:
    return tuple(n * shard.head_dim for n in (heads, held.first, held.end))  # type: ignore[return-value]
