"""Quantized weights: what is refused, and that what is loaded computes what transformers does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt.errors import ConfigError, ModelError
from pdrt.model import quantization
from pdrt.model.quantization import (
    KINDS,
    METHODS,
    check_quantization,
    spare_odd_shapes,
    transformers_config,
)
from tests.model.conftest import LoadExecutor, TinyModel
from tests.model.test_families import generate
from tests.model.tiny import write_model

TOLERANCE = 1e-3


def needs(package: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed")


KIND_PARAMS = [
    pytest.param(kind, id=kind, marks=needs(package)) for kind, package in sorted(KINDS.items())
]


@pytest.fixture
def as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with AVX512-BF16, bitsandbytes rounds activations to bfloat16, and what is the
    same but for float32's rounding comes out different."""
    if importlib.util.find_spec("bitsandbytes"):
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_is_installed", lambda package: False)


def test_an_unknown_kind_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--quantization int3: known are int8, nf4"):
        check_quantization({}, "int3")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(("kind", "package"), sorted(KINDS.items()))
def test_a_kind_names_the_package_it_needs(kind: str, package: str) -> None:
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        check_quantization({}, kind)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("method", "packages"), [item for item in sorted(METHODS.items()) if item[1]]
)
def test_a_quantized_checkpoint_names_the_packages_it_needs(
    method: str, packages: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError, match=f"{method}.*pip install {' '.join(packages)}"):
        check_quantization({"quantization_config": {"quant_method": method}}, None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "hqq"}, "'hqq', which is not supported; supported are auto-round, awq"),
    ({"bits": 4}, "no quant_method"),
]


@pytest.mark.parametrize(("entry", "reason"), REFUSED)
def test_a_checkpoint_of_another_method_is_refused(entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_quantization({"quantization_config": entry}, None)


def test_quantizing_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantized with gptq already"):
        check_quantization({"quantization_config": {"quant_method": "gptq"}}, "int8")


def test_dummies_are_not_quantized(tiny_model: TinyModel, load_executor: LoadExecutor) -> None:
    kind = next((kind for kind, package in KINDS.items() if importlib.util.find_spec(package)), "")
    if not kind:
        pytest.skip("no package of any kind is installed")
    with pytest.raises(ConfigError, match="needs weights"):
        load_executor(tiny_model("llama"), quantization=kind, load_format="dummy")


def check_logits(executor: Any, reference: Any) -> None:
    """All of what the executor computes in chunks and batches is the reference's."""
    for run in generate(executor):
        with torch.no_grad():
            expected = reference(torch.tensor([run.tokens[:-1]]), use_cache=False).logits[0]
        actual = torch.stack(run.logits)
        torch.testing.assert_close(actual, expected[run.prompt - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_a_kind_computes_what_transformers_does(
    tmp_path: Path, load_executor: LoadExecutor, kind: str
) -> None:
    write_model(tmp_path, "Qwen2Config", {"initializer_range": 0.12})
    plain = load_executor(tmp_path, page_size=4)
    executor = load_executor(tmp_path, page_size=4, quantization=kind)
    assert executor.layout == plain.layout
    assert executor.identity.digest == f"{plain.identity.digest}+{kind}"
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers_config(kind, "float32"),
    )
    check_logits(executor, reference)
    a, b = (generate(each)[0].logits[0] for each in (plain, executor))
    assert (a - b).abs().max() > 10 * TOLERANCE, "nothing was quantized"


@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_a_width_that_fills_no_block(
    tmp_path: Path, load_executor: LoadExecutor, kind: str
) -> None:
    write_model(tmp_path, "Qwen2Config", {"intermediate_size": 80})
    executor = load_executor(tmp_path, page_size=4, quantization=kind)
    assert all(torch.isfinite(run.logits[-1]).all() for run in generate(executor))


@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_experts_and_bfloat16(tmp_path: Path, load_executor: LoadExecutor, kind: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    write_model(tmp_path, "Qwen3MoeConfig", experts, dtype=torch.bfloat16)
    executor = load_executor(tmp_path, page_size=4, quantization=kind, dtype="bfloat16")
    assert executor.layout.dtype == "bfloat16"
    assert all(torch.isfinite(run.logits[-1]).all() for run in generate(executor))


class Layer(torch.nn.Linear):
    """As bitsandbytes' on a processor with AVX512-BF16."""

    support_avx512bf16_for_cpu = True

    def __init__(self, inputs: int, outputs: int, blocksize: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.blocksize = blocksize  # type: ignore[attr-defined]


def test_what_bitsandbytes_cannot_lay_out_anew() -> None:
    shapes = [(64, 32, 64), (96, 32, 64), (64, 48, 64), (96, 64, 32)]
    model = torch.nn.Sequential(*(Layer(*shape) for shape in shapes), torch.nn.Linear(3, 3))
    spare_odd_shapes(model)
    kept = [layer.support_avx512bf16_for_cpu for layer in model if isinstance(layer, Layer)]
    assert kept == [True, False, False, True]


@pytest.mark.usefixtures("as_elsewhere")
@needs("bitsandbytes")
def test_a_checkpoint_that_is_quantized_already(
    tmp_path: Path, tiny_model: TinyModel, load_executor: LoadExecutor
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama"),
        dtype=torch.float32,
        quantization_config=transformers_config("nf4", "float32"),
    )
    write_model(tmp_path, "LlamaConfig", {})
    model.save_pretrained(tmp_path)
    executor = load_executor(tmp_path, page_size=4)
    assert executor.identity.digest.isalnum(), "the weights are what they are: no flag of a worker"
    check_logits(executor, model)
