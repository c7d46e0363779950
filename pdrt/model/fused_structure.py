"""Which models the fused decoder computes, read from the loaded transformers module itself.

Recognition is strict in three ways: the kind is one whose code in transformers was read and that
`tests/model/test_fused.py` lists; every submodule, parameter and buffer has a place here, and is
of the plain class; and what modules compute (norms, activation, embedding, rope) is tried out, not
concluded from their names. What is left, `pdrt.model.fused_check` compares as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdrt.model.attention import LayerCall
from pdrt.model.native.linear import LinearPart

FUSED_TYPES = frozenset({
    "cwm", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral", "mistral",
    "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "vaultgemma",
})  # fmt: skip
"""Values of `model_type`. Structure alone is not enough: ministral3 is built like mistral, and
scales its queries by their position."""

NORM_PLACES = {
    # (before attention, after it, before the MLP, after it)
    ("input_layernorm", "post_attention_layernorm"): (
        "input_layernorm", None, "post_attention_layernorm", None,
    ),
    ("input_layernorm", "pre_feedforward_layernorm"): (
        "input_layernorm", None, "pre_feedforward_layernorm", None,
    ),
    ("post_attention_layernorm", "post_feedforward_layernorm"): (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    ),
    (
        "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm",
        "pre_feedforward_layernorm",
    ): (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""By the norms that a layer has. With two, `post_attention_layernorm` stands before the MLP where
there is an `input_layernorm`, and after attention where there is none."""

PROBE_TOLERANCE = 1e-5
"""Relative; in float32, where each side rounds its last bit in its own way."""


class NotFusedError(Exception):
    """The model has something that the fused decoder does not compute; says what."""


class Norm(msgspec.Struct, frozen=True):
    """`x * rsqrt(mean(x^2) + epsilon) * weight`."""

    weight: Tensor
    """(width,) float32."""
    epsilon: float


class Attention(msgspec.Struct, frozen=True):
    """The attention of one layer, as seen when it was called."""

    qkv: list[LinearPart]
    """Queries, keys, values; one part, or three."""
    output: LinearPart
    query_norm: Norm | None
    """Over a head, or over all heads at once, as its weight is wide."""
    key_norm: Norm | None
    rope: str | None
    """Key of `Structure.ropes`, or None for a layer that does not rotate."""
    scaling: float
    softcap: float | None
    window: int | None


class Mlp(msgspec.Struct, frozen=True):
    """`down(act(gate) * up)`."""

    gate_up: list[LinearPart]
    """One part, or two."""
    down: LinearPart
    is_gelu: bool
    """GELU's tanh approximation instead of SiLU."""


class Layer(msgspec.Struct, frozen=True):
    """One decoder layer; norms where it has them."""

    input_norm: Norm | None
    attention: Attention
    attention_norm: Norm | None
    """Of what attention adds to the residual."""
    mlp_norm: Norm | None
    mlp: Mlp
    output_norm: Norm | None
    """Of what the MLP adds to the residual."""


class Rope(msgspec.Struct, frozen=True):
    """Rotations by position, as the model's own rotary embedding gives them."""

    cos: Tensor
    """(positions, rotary / 2) float32, and so is `sin`."""
    sin: Tensor


class Structure(msgspec.Struct, frozen=True):
    """All that the fused decoder needs of a model. Its tensors are the module's: whoever packs
    them empties `layers` on the way, so that no second copy is held."""

    embedding: Tensor
    """(vocabulary, hidden)."""
    embedding_scale: float
    layers: list[Layer]
    norm: Norm
    head: LinearPart
    """Its weight is `embedding` where the model ties the two."""
    ropes: dict[str, Rope]
    residual_multiplier: float
    """Of what is added to the residual."""
    logits_divisor: float
    logits_softcap: float | None

    @property
    def is_tied(self) -> bool:
        return self.head.weight.data_ptr() == self.embedding.data_ptr()


def check_kind(config: Any) -> None:
    """Refuse, by a model's configuration alone, what `recognize` would refuse.

    Raises:
        NotFusedError: it is not of one of the `FUSED_TYPES`.
    """
    _require(config.model_type in FUSED_TYPES, f"model_type {config.model_type}")


@torch.inference_mode()
def recognize(module: nn.Module, calls: Sequence[LayerCall], max_model_len: int) -> Structure:
    """The structure of a model.

    Args:
        module: a causal model of transformers, loaded.
        calls: what its layers asked of the attention backend in one forward, in order.
        max_model_len: positions that are ever rotated.

    Raises:
        NotFusedError: the model is left to transformers; says why.
    """
    model: Any = module
    config = model.config
    check_kind(config)
    _check_members(module, {"model", "lm_head"})
    _check_members(model.model, {"embed_tokens", "layers", "norm", "rotary_emb"})
    dtypes = {parameter.dtype for parameter in module.parameters()}
    _require(len(dtypes) == 1, "weights of several dtypes")
    layers = [
        _layer(layer, index, call, config)
        for index, (layer, call) in enumerate(zip(model.model.layers, calls, strict=True))
    ]
    names = {layer.attention.rope for layer in layers} - {None}
    embedding = model.model.embed_tokens
    return Structure(
        embedding=embedding.weight.data,
        embedding_scale=_embedding_scale(embedding)
        * float(getattr(model.model, "embedding_multiplier", 1.0)),
        layers=layers,
        norm=_norm(model.model.norm),
        head=_linear(model.lm_head, "lm_head"),
        ropes={name: _rope(model.model.rotary_emb, name, max_model_len) for name in names if name},
        residual_multiplier=float(getattr(config, "residual_multiplier", 1.0)),
        logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
    )


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotFusedError(otherwise)


def _check_members(module: nn.Module, known: set[str]) -> None:
    """Refuse whatever has no place; dropout does nothing outside of training."""
    members = {name for name, part in module.named_children() if not isinstance(part, nn.Dropout)}
    members |= {name for name, _ in module.named_parameters(recurse=False)}
    if other := sorted(members ^ known):
        raise NotFusedError(f"{type(module).__name__}.{other[0]}")


# Layers


def _layer(layer: Any, index: int, call: LayerCall, config: Any) -> Layer:
    norms = tuple(sorted(name for name, _ in layer.named_children() if name.endswith("norm")))
    _require(norms in NORM_PLACES, f"norms of {type(layer).__name__}: {', '.join(norms)}")
    _check_members(layer, {"self_attn", "mlp", *norms})
    input_norm, attention_norm, mlp_norm, output_norm = (
        None if name is None else _norm(getattr(layer, name)) for name in NORM_PLACES[norms]
    )
    return Layer(
        input_norm=input_norm,
        attention=_attention(layer.self_attn, index, call, config),
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        mlp=_mlp(layer.mlp),
        output_norm=output_norm,
    )


def _attention(attention: Any, index: int, call: LayerCall, config: Any) -> Attention:
    names = ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    has_norms = hasattr(attention, "q_norm") or hasattr(attention, "k_norm")
    _check_members(attention, {*names, "o_proj", *(("q_norm", "k_norm") if has_norms else ())})
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[index] if layer_types else "full_attention"
    # Exaone 4 rotates in the layers that have a window, where there are such.
    is_rotated = getattr(attention, "use_rope", True)
    if config.model_type == "exaone4":
        is_rotated = attention.sliding_window is None or attention.is_sliding
    return Attention(
        qkv=[_linear(getattr(attention, name), name) for name in names],
        output=_linear(attention.o_proj, "o_proj"),
        query_norm=_norm(attention.q_norm) if has_norms else None,
        key_norm=_norm(attention.k_norm) if has_norms else None,
        rope=kind if is_rotated else None,
        scaling=call.scaling,
        softcap=call.softcap,
        window=call.window,
    )


def _mlp(mlp: Any) -> Mlp:
    is_fused = hasattr(mlp, "gate_up_proj")
    names = ["gate_up_proj"] if is_fused else ["gate_proj", "up_proj"]
    activation = mlp.activation_fn if is_fused else mlp.act_fn
    others = {"activation_fn" if is_fused else "act_fn"} & dict(mlp.named_children()).keys()
    _check_members(mlp, {*names, "down_proj", *others})
    return Mlp(
        gate_up=[_linear(getattr(mlp, name), name) for name in names],
        down=_linear(mlp.down_proj, "down_proj"),
        is_gelu=_is_gelu(activation),
    )


def _linear(linear: Any, name: str) -> LinearPart:
    # A subclass is a quantized one, or does more than a product.
    _require(type(linear) is nn.Linear, f"{name} is a {type(linear).__name__}")
    return LinearPart(linear.weight.data, None if linear.bias is None else linear.bias.data)


# Tried out


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE)


def _norm(norm: Any) -> Norm:
    """The norm that `norm` computes: some multiply by their weight, some by one more."""
    name = type(norm).__name__
    _check_members(norm, {"weight"})
    epsilon = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
    _require(epsilon > 0 and norm.weight.ndim == 1, name)
    stored = norm.weight.detach().float()
    # Small, so that epsilon counts; around another mean than 0, so that centering would show.
    probe = torch.linspace(-1, 2, len(stored)).mul_(epsilon**0.5)[None]
    normed = probe * torch.rsqrt(probe.pow(2).mean(-1, keepdim=True) + epsilon)
    found = norm(probe)
    for weight in (stored, 1 + stored):
        if _is_close(found, normed * weight):
            return Norm(weight.clone(), epsilon)
    raise NotFusedError(name)


def _is_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    probe = torch.linspace(-6, 6, 49)
    found = activation(probe)
    if _is_close(found, F.silu(probe)):
        return False
    _require(
        _is_close(found, F.gelu(probe, approximate="tanh")),
        f"activation {type(activation).__name__}",
    )
    return True


def _embedding_scale(embedding: Any) -> float:
    name = type(embedding).__name__
    _require(isinstance(embedding, nn.Embedding), name)
    scale = float(getattr(embedding, "embed_scale", torch.tensor(1.0)).to(embedding.weight.dtype))
    ids = torch.arange(min(4, embedding.num_embeddings), device=embedding.weight.device)
    expected = embedding.weight[ids] * scale
    _require(_is_close(embedding(ids), expected), name)
    return scale


def _rope(rotary: Any, kind: str, max_model_len: int) -> Rope:
    """All rotations that may be needed. Asked for by kind of layer where there are several."""
    positions = torch.arange(max_model_len)[None]
    kinds = (kind,) if hasattr(rotary, "layer_types") else ()
    cos, sin = rotary(torch.empty(0, dtype=torch.float32), positions, *kinds)
    half = cos.shape[-1] // 2
    for part in (cos, sin):
        _require(part.dtype == torch.float32 and part.shape[0] == 1, type(rotary).__name__)
        _require(torch.equal(part[..., :half], part[..., half:]), type(rotary).__name__)
    return Rope(*(part[0, :, :half].contiguous() for part in (cos, sin)))
