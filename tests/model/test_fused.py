"""The fused decoder: what it takes on, what it leaves to transformers, and that it says so.

That it computes the same is compared in test_parity.py and test_families.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pdrt.model import attention, fused, fused_check, loader_weights
from pdrt.model.attention import ForwardContext, LayerCall
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.model.fused_kernels import FusedKernels
from pdrt.model.fused_structure import FUSED_TYPES, NotFusedError, Structure, recognize
from pdrt.model.native.linear import LinearKind, LinearPlan, TorchLinear
from tests.model.conftest import LoadExecutor, TinyModel, UseForward
from tests.model.families import FAMILIES
from tests.model.sequences import GREEDY, PageSource, Run, run_step
from tests.model.test_families import check, generate
from tests.model.tiny import write_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
CALL = LayerCall(
    query=torch.empty(0), key=torch.empty(0), value=torch.empty(0),
    layer=0, scaling=0.25, softcap=None, window=None,
)  # fmt: skip


def structure(module: nn.Module) -> Structure:
    layers: Any = module.model.layers  # type: ignore[union-attr]
    return recognize(module, [CALL] * len(layers), 64)


@pytest.fixture
def module(tiny_model: TinyModel) -> Any:
    attention.register()
    return AutoModelForCausalLM.from_pretrained(
        tiny_model("llama"), attn_implementation=attention.ATTENTION_NAME
    )


# What is taken on


def test_a_plain_model_is_recognized(module: Any) -> None:
    found = structure(module)
    assert [len(layer.attention.qkv) for layer in found.layers] == [3, 3, 3]
    assert {layer.attention.rope for layer in found.layers} == {"full_attention"}
    assert found.ropes["full_attention"].cos.shape == (64, 8)
    assert (found.embedding_scale, found.residual_multiplier, found.logits_divisor) == (1, 1, 1)
    assert not found.is_tied


def test_every_kind_that_is_fused_is_compared_with_transformers() -> None:
    assert {family.model_type for family in FAMILIES} >= FUSED_TYPES


def test_the_document_names_what_is_fused() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = text.partition("<!-- fused -->")[2].partition("<!-- /fused -->")[0]
    assert set(named.replace("`", "").replace(",", " ").split()) == FUSED_TYPES


# What is left to transformers


class Doubled(nn.Linear):
    """Looks like a linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Centered(nn.Module):
    """Has all that an RMS norm has."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)


class Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1


def _put(path: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Replaces a part of the first layer, or of the model where the path begins with a dot."""

    def change(module: Any) -> None:
        holder = module.model if path.startswith(".") else module.model.layers[0]
        *folders, name = path.lstrip(".").split(".")
        for folder in folders:
            holder = getattr(holder, folder)
        setattr(holder, name, make(getattr(holder, name, None)))

    return change


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (_put("self_attn.k_proj", lambda old: Doubled(64, 32, bias=False)), "k_proj is a Doubled"),
    (_put("self_attn.sinks", lambda old: nn.Parameter(torch.ones(4))), "LlamaAttention.sinks"),
    (_put("self_attn.q_norm", lambda old: nn.LayerNorm(16)), "LlamaAttention.k_norm"),
    (_put("mlp.experts", lambda old: nn.ModuleList()), "LlamaMLP.experts"),
    (_put("mlp.act_fn", lambda old: nn.ReLU()), "activation ReLU"),
    (_put("mlp.act_fn", lambda old: nn.GELU()), "activation GELU"),
    (_put("input_layernorm", Centered), "Centered"),
    (_put("input_layernorm", lambda old: nn.LayerNorm(64)), "LayerNorm.bias"),
    (_put("middle_norm", lambda old: nn.LayerNorm(64)), "middle_norm"),
    (_put(".norm", Centered), "Centered"),
    (_put(".embed_tokens", lambda old: Shifted(old.num_embeddings, 64)), "Shifted"),
    (_put(".embed_positions", lambda old: nn.Embedding(64, 64)), "LlamaModel.embed_positions"),
    (lambda module: module.to(torch.bfloat16).lm_head.float(), "several dtypes"),
    (lambda module: setattr(module.config, "model_type", "llama9"), "model_type llama9"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_whatever_has_no_place_is_refused(
    module: Any, change: Callable[[Any], None], reason: str
) -> None:
    change(module)
    with pytest.raises(NotFusedError, match=reason):
        structure(module)


def test_a_kind_that_is_not_known_runs_over_the_kernels(
    tmp_path: Path, load_executor: LoadExecutor, use_forward: UseForward
) -> None:
    use_forward("fused")
    write_model(tmp_path, "LlamaConfig", {"hidden_act": "relu", "initializer_range": 0.12})
    executor = load_executor(tmp_path, page_size=4)
    assert executor.description.startswith("transformers' own, native")
    assert executor.description.endswith("(not known to the fused decoder: activation ReLU)")
    check(tmp_path, generate(executor))


def test_heads_that_the_kernels_do_not_know(
    tmp_path: Path, load_executor: LoadExecutor, use_forward: UseForward
) -> None:
    use_forward("fused")
    write_model(tmp_path, "LlamaConfig", {"head_dim": 12, "initializer_range": 0.12})
    executor = load_executor(tmp_path, page_size=4)
    assert "SDPA attention (the kernels do not know float32 heads of 12)" in executor.description
    check(tmp_path, generate(executor))


def test_without_kernels(
    tiny_model: TinyModel,
    load_executor: LoadExecutor,
    use_forward: UseForward,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_forward("sdpa")
    with caplog.at_level(logging.INFO, logger="pdrt.model.loader"):
        executor = load_executor(tiny_model("llama"))
    said = "transformers' own, SDPA attention (there are no compiled kernels)"
    assert executor.description == said
    assert f"forward: {said}" in caplog.messages


def test_one_that_computes_something_else_is_not_used(
    tmp_path: Path,
    load_executor: LoadExecutor,
    use_forward: UseForward,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The weights are gone by then: they are read again."""
    use_forward("fused")
    write_model(tmp_path, "LlamaConfig", {"initializer_range": 0.12})
    right = FusedKernels.gate
    monkeypatch.setattr(
        FusedKernels, "gate", lambda self, x, is_gelu, out: right(self, x, not is_gelu, out)
    )
    executor = load_executor(tmp_path, page_size=4)
    assert executor.description.startswith("transformers' own, native")
    assert "its logits differ by" in executor.description
    assert [record.levelname for record in caplog.records if "again" in record.message] == [
        "WARNING"
    ]
    check(tmp_path, generate(executor))


# How it runs


@pytest.fixture
def executor(
    tiny_model: TinyModel, load_executor: LoadExecutor, use_forward: UseForward
) -> Executor:
    use_forward("fused")
    return load_executor(tiny_model("llama"), page_size=4)


def test_the_transformers_module_gives_its_weights_up(
    tiny_model: TinyModel,
    load_executor: LoadExecutor,
    use_forward: UseForward,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_forward("fused")
    read, modules = loader_weights.Checkpoint.read, []

    def keep(checkpoint: Any) -> nn.Module:
        modules.append(read(checkpoint))
        return modules[-1]

    monkeypatch.setattr(loader_weights.Checkpoint, "read", keep)
    executor = load_executor(tiny_model("llama"))
    assert executor.description.startswith("fused decoder, native")
    (module,) = modules
    assert sum(parameter.numel() for parameter in module.parameters()) == 0


def test_a_step_whose_scored_tokens_are_as_many_as_its_tokens(executor: Executor) -> None:
    """What is kept is all tokens then, and yet not in their order."""
    ids = [9, 8, 7, 6]
    row = Row(token_ids=ids, start=0, pages=[3], sampling=GREEDY, scored=ids[1:])
    alone = Row(token_ids=ids, start=0, pages=[3], sampling=None, scored=ids)
    with torch.inference_mode():
        both, scored = (
            executor.forward(ForwardContext(executor.pool, [each], executor._backend)).clone()
            for each in (row, alone)
        )
    torch.testing.assert_close(both, scored[[3, 0, 1, 2]], atol=1e-5, rtol=0)


def test_a_step_that_keeps_no_logits_stores_its_kv_all_the_same(executor: Executor) -> None:
    row = Row(token_ids=[9, 8, 7], start=0, pages=[3], sampling=None)
    executor.pool.tensor.zero_()
    with torch.inference_mode():
        logits = executor.forward(ForwardContext(executor.pool, [row], executor._backend))
    assert logits.shape == (0, executor.identity.vocab_size)
    stored = executor.pool.tensor[3, :, :, :, :3]
    assert (stored != 0).any(dim=-1).all()
    assert (executor.pool.tensor[3, :, :, :, 3:] == 0).all()


def test_a_row_does_not_depend_on_its_batch(executor: Executor) -> None:
    """To the bit: greedy tokens do not change with what else is served."""
    source = PageSource(executor)
    runs = [Run(executor, source, [20 + n, *range(30, 40 + 3 * n)], 64) for n in range(6)]
    for run in runs:
        run_step(executor, [(run, run.prompt)])
    rows = [run.row(1) for run in runs]
    chunk = Row(token_ids=list(range(5, 50)), start=0, pages=source.take(12), sampling=None)
    with torch.inference_mode():
        together = executor.forward(
            ForwardContext(executor.pool, [*rows, chunk], executor._backend)
        ).clone()
        for index, row in enumerate(rows):
            context = ForwardContext(executor.pool, [row], executor._backend)
            assert torch.equal(executor.forward(context)[0], together[index])


def test_an_mlp_takes_a_long_prompt_in_parts(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(token_ids=list(range(5, 50)), start=0, pages=list(range(12)), sampling=None)
    row = msgspec.structs.replace(row, scored=row.token_ids)
    context = ForwardContext(executor.pool, [row], executor._backend)
    with torch.inference_mode():
        at_once = executor.forward(context).clone()
        monkeypatch.setattr(fused, "MLP_ROWS", 7)
        assert torch.equal(executor.forward(context), at_once)


# bfloat16


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_in_bfloat16(
    family: str, tiny_model: TinyModel, load_executor: LoadExecutor, use_forward: UseForward
) -> None:
    use_forward("fused")
    directory = tiny_model(family, initializer_range=0.12)
    executor = load_executor(directory, page_size=4, dtype="bfloat16")
    assert executor.description.startswith("fused decoder")
    assert_near_in_bfloat16(directory, executor)


# Linear layers of other kinds, which processors with instructions for bfloat16 have


LoadWithTorch = Callable[[str, str], Executor]


@pytest.fixture
def load_with_torch(
    tmp_path: Path,
    load_executor: LoadExecutor,
    use_forward: UseForward,
    monkeypatch: pytest.MonkeyPatch,
) -> LoadWithTorch:
    """`load_with_torch(dtype, family)`: a fused decoder of a family, its model in `tmp_path`, with
    linear layers of torch."""

    def load(name: str, family: str) -> Executor:
        use_forward("fused")
        dtype: torch.dtype = getattr(torch, name)
        plan = LinearPlan(LinearKind.TORCH, dtype, TorchLinear, lambda part: TorchLinear([part]))
        monkeypatch.setattr(fused_check, "choose_linear", lambda *arguments: plan)
        (kind,) = (each for each in FAMILIES if each.name == family)
        write_model(tmp_path, kind.config, {"initializer_range": 0.12, **kind.settings})
        return load_executor(tmp_path, page_size=4, dtype=name)

    return load


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_layers_that_do_not_write_where_they_are_told(
    family: str, tmp_path: Path, load_with_torch: LoadWithTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MLP_ROWS", 7)
    executor = load_with_torch("float32", family)
    assert "torch linears (float32 stored, float32 computed)" in executor.description
    check(tmp_path, generate(executor))


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "qwen3"])
def test_activations_in_bfloat16(
    family: str, tmp_path: Path, load_with_torch: LoadWithTorch
) -> None:
    executor = load_with_torch("bfloat16", family)
    assert "torch linears (bfloat16 stored, bfloat16 computed)" in executor.description
    assert_near_in_bfloat16(tmp_path, executor)


def assert_near_in_bfloat16(directory: Path, executor: Executor) -> None:
    """As near to float32 as transformers in bfloat16, of the same weights: those that bfloat16 can
    hold; by the KL divergence."""
    (run,) = generate(executor, (45,))
    tokens = torch.tensor([run.tokens[:-1]])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = model(tokens, use_cache=False).logits[0, run.prompt - 1 :]
        exact = model.float()(tokens, use_cache=False).logits[0, run.prompt - 1 :]
    ours = torch.stack(run.logits)
    assert _divergence(ours, exact) <= 1.5 * _divergence(theirs, exact) + 1e-6


def _divergence(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean KL divergence, in nats."""
    found, wanted = (x.double().log_softmax(dim=-1) for x in (logits, expected))
    return float(nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))
