"""Quantized weights: what a checkpoint is quantized with already, and `--quantization`, which
quantizes the linear layers while they are loaded. The KV is the same either way."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from torch import nn

from pdrt.errors import ConfigError, ModelError

KINDS: Mapping[str, str] = {"int8": "torchao", "nf4": "bitsandbytes"}
"""Values of `--quantization`, and the package that each needs. Only weights are quantized:
activations, if they were, would be rounded by what else is in the batch, and a token with them."""

METHODS: Mapping[str, tuple[str, ...]] = {
    "auto-round": ("auto-round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": (),
    "gptq": ("gptqmodel", "optimum"),
    "torchao": ("torchao",),
}
"""What a checkpoint may be quantized with, and the packages that transformers reads it with."""


PACKED_OUTPUTS = 32
"""Of a layer, which bitsandbytes lays out together."""


def check_quantization(config: Mapping[str, Any], quantization: str | None) -> None:
    """Refuse what cannot be loaded here, given the model's config.json and `--quantization`.

    Raises:
        ConfigError: there is no such kind, its package is missing, or the model has one already.
        ModelError: the checkpoint's method is not known, or its package is missing.
    """
    method = checkpoint_method(config)
    if method is not None:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {quantization}: the weights are quantized with {method} already; "
                "leave it out"
            )
        _check_method(method)
    if quantization is None:
        return
    if quantization not in KINDS:
        raise ConfigError(f"--quantization {quantization}: known are {', '.join(sorted(KINDS))}")
    if not _is_installed(KINDS[quantization]):
        raise ConfigError(
            f"--quantization {quantization} needs a package that is not installed: "
            f"pip install {KINDS[quantization]} (or pdrt[quantization])"
        )


def checkpoint_method(config: Mapping[str, Any]) -> str | None:
    """How a checkpoint is quantized, or None if it is not.

    Raises:
        ModelError: config.json says that it is, and not how.
    """
    entry = config.get("quantization_config") or config.get("compression_config")
    if not entry:
        return None
    if not isinstance(entry, dict):
        raise ModelError("quantization_config in config.json is no object")
    if entry.get("load_in_4bit") or entry.get("load_in_8bit"):
        return "bitsandbytes"
    method = entry.get("quant_method")
    if not isinstance(method, str):
        raise ModelError("quantization_config in config.json has no quant_method")
    return method


def transformers_config(quantization: str, dtype: str) -> Any:
    """What `from_pretrained` takes for a kind, to compute in `dtype`; its package is installed."""
    import transformers

    kinds: Any = transformers
    match quantization:
        case "int8":
            from torchao.quantization import Int8WeightOnlyConfig

            return kinds.TorchAoConfig(Int8WeightOnlyConfig(version=2))
        case "nf4":
            return kinds.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
    raise AssertionError(f"{quantization} is in KINDS")


def spare_odd_shapes(module: nn.Module) -> None:
    """On a processor with AVX512-BF16, bitsandbytes (0.50) lays weights out anew in the first
    forward, and fails where a row does not divide into its blocks. Those it computes as on other
    processors."""
    for part in module.modules():
        layer: Any = part
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            inputs, outputs = layer.in_features, layer.out_features
            layer.support_avx512bf16_for_cpu = not (
                inputs % layer.weight.blocksize or outputs % PACKED_OUTPUTS
            )


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ModelError(
            f"the weights are quantized with {method!r}, which is not supported; supported are "
            f"{', '.join(sorted(METHODS))}"
        )
    missing = [package for package in METHODS[method] if not _is_installed(package)]
    if missing:
        raise ModelError(
            f"the weights are quantized with {method!r}, which needs packages that are not "
            f"installed: pip install {' '.join(missing)}"
        )


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
