"""What each rank takes of a model's weights: arithmetic on names and shapes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import transformers

from pdrt.errors import ModelError
from pdrt.kv.layout import rank_heads
from pdrt.model.sharding import (
    SPLIT_TYPES,
    OnRankZero,
    Part,
    Shard,
    check_split,
    local_config,
    part_of,
    shard_of,
    share,
)
from pdrt.model.support import TESTED_TYPES

RANKS = (1, 2, 3, 4, 6, 8)
HEAD_DIM = 4
SHAPES = [(heads, kv) for heads in (8, 12, 24) for kv in (1, 2, 3, 4, 8, 12) if heads % kv == 0]


def config(heads: int, kv_heads: int, **changes: int) -> transformers.LlamaConfig:
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * HEAD_DIM,
        "head_dim": HEAD_DIM,
        "intermediate_size": 50,
        **changes,
    }
    return transformers.LlamaConfig(**fields)


def shards(heads: int, kv_heads: int, ranks: int) -> list[Shard]:
    return [shard_of(config(heads, kv_heads), rank, ranks) for rank in range(ranks)]


def held(part: Part) -> list[int]:
    return [index for first, end in part.ranges for index in range(first, end)]


def part(shard: Shard, name: str, shape: tuple[int, ...]) -> Part:
    found = part_of(shard, f"model.layers.0.{name}", shape)
    assert isinstance(found, Part)
    return found


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        (shape, ranks)
        for shape, ranks in itertools.product(SHAPES, RANKS)
        if shape[0] % ranks == 0 and max(shape[1], ranks) % min(shape[1], ranks) == 0
    ],
)
def test_each_query_head_meets_the_kv_head_that_it_attends_with(
    shape: tuple[int, int], ranks: int
) -> None:
    heads, kv_heads = shape
    seen: list[int] = []
    for shard in shards(heads, kv_heads, ranks):
        queries, keys = shard.queries, shard.keys
        seen += range(queries.first, queries.end)
        assert keys == rank_heads(kv_heads, ranks)[shard.rank]
        for number in range(queries.count):
            # The one that a module with the rank's numbers of heads takes for it.
            local = number // (queries.count // keys.count)
            assert keys.first + local == (queries.first + number) // (heads // kv_heads)
    assert seen == list(range(heads))


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize(
    ("name", "shape", "dimension"),
    [
        ("self_attn.q_proj", (48, 48), 0),
        ("mlp.up_proj", (50, 48), 0),
        ("self_attn.o_proj", (48, 48), 1),
        ("mlp.down_proj", (48, 50), 1),
    ],
)
def test_rows_and_columns_of_all_ranks_are_the_whole(
    name: str, shape: tuple[int, int], dimension: int, ranks: int
) -> None:
    parts = [part(shard, f"{name}.weight", shape) for shard in shards(12, 6, ranks)]
    assert {each.dimension for each in parts} == {dimension}
    assert [index for each in parts for index in held(each)] == list(range(shape[dimension]))


def test_parts_of_one_matrix_are_taken_from_each() -> None:
    (_, second) = shards(4, 2, 2)
    qkv = part(second, "self_attn.qkv_proj.weight", (32, 16))
    assert qkv.ranges == ((8, 16), (20, 24), (28, 32))
    gate_up = part(second, "mlp.gate_up_proj.weight", (20, 16))
    assert gate_up.ranges == ((5, 10), (15, 20))
    assert part(second, "self_attn.qkv_proj.bias", (32,)) == qkv


def test_experts_are_split_like_an_mlp() -> None:
    (first, _) = shards(4, 2, 2)
    assert part(first, "mlp.experts.gate_up_proj", (3, 20, 16)) == Part(1, ((0, 5), (10, 15)))
    assert part(first, "mlp.experts.down_proj", (3, 16, 10)) == Part(2, ((0, 5),))
    assert part(first, "mlp.experts.1.gate_proj.weight", (10, 16)) == Part(0, ((0, 5),))
    assert part(first, "block_sparse_moe.experts.1.w2.weight", (16, 10)) == Part(1, ((0, 5),))


def test_replicated_kv_heads() -> None:
    parts = shards(6, 2, 6)
    keys = [part(shard, "self_attn.k_proj.weight", (8, 24)).ranges for shard in parts]
    assert keys == [((0, 4),)] * 3 + [((4, 8),)] * 3


def test_the_middle_of_an_mlp_may_divide_unevenly() -> None:
    assert [share(10, rank, 3) for rank in range(3)] == [(0, 3), (3, 6), (6, 10)]
    widths = [local_config(config(6, 3), s).intermediate_size for s in shards(6, 3, 3)]
    assert widths == [16, 17, 17]


def test_a_summed_bias_is_added_once_and_others_are_whole() -> None:
    (first, second) = shards(4, 2, 2)
    for shard in (first, second):
        assert part_of(shard, "model.layers.0.self_attn.o_proj.bias", (16,)) == OnRankZero()
        for name in ("model.embed_tokens", "model.norm", "model.layers.0.mlp.gate", "lm_head"):
            assert part_of(shard, f"{name}.weight", (16,)) is None
        assert part_of(shard, "model.layers.0.self_attn.q_norm.weight", (HEAD_DIM,)) is None


def test_a_rank_has_a_configuration_of_its_own() -> None:
    whole = config(12, 3, intermediate_size=48)
    local = local_config(whole, shard_of(whole, 1, 6))
    assert (local.num_attention_heads, local.num_key_value_heads) == (2, 1)
    assert (local.head_dim, local.hidden_size, local.intermediate_size) == (HEAD_DIM, 48, 8)
    assert (whole.num_attention_heads, whole.intermediate_size) == (12, 48)


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ModelError, match=r"9 attention heads and 3 KV heads.* over 2; .*are 1, 3, 9"
    ):
        shard_of(config(9, 3), 0, 2)
    with pytest.raises(
        ModelError, match=r"4 attention heads and 4 KV heads.* over 8; .*are 1, 2, 4"
    ):
        shard_of(config(4, 4), 0, 8)
    # The queries divide, the keys do not.
    with pytest.raises(ModelError, match=r"12 attention heads and 3 KV heads.* over 4;"):
        shard_of(config(12, 3), 0, 4)


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match=r"2 ranks \(--tensor-parallel-size, .*\): model_type 'gpt2'"
    ):
        check_split({"model_type": "gpt2"}, 2, None)
    with pytest.raises(
        ModelError, match=r"3 ranks \(--tensor-parallel-size, .*\): weights quantized with awq"
    ):
        check_split({"model_type": "llama"}, 3, "awq")
    check_split({"model_type": "gpt2"}, 1, "awq")
    check_split({"model_type": "llama"}, 2, None)
    with pytest.raises(ModelError, match=r"q_norm\.weight spans all heads"):
        part_of(shards(4, 2, 2)[0], "model.layers.0.self_attn.q_norm.weight", (16,))


def test_only_known_kinds_are_split() -> None:
    assert SPLIT_TYPES <= TESTED_TYPES


def test_the_document_names_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    named = text.partition("<!-- split -->")[2].partition("<!-- /split -->")[0]
    assert set(re.findall(r"`(\w+)`", named)) == SPLIT_TYPES
