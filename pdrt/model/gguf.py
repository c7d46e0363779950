"""Converting a GGUF file into a Hugging Face directory: `python -m pdrt.model.gguf FILE TARGET`.

Weights become bfloat16, the widest dtype whose loss is far below that of any quantization. What
transformers' import loses of the tokenizer is put back.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

ADDRESS_BYTES = 32 << 30
ADDRESS_BYTES_PER_BYTE = 32
"""Address space of a conversion: libraries take much that they never touch, and four bits of a file
become 16, then 32."""
DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""Values of `tokenizer.ggml.pre` whose pre-tokenizer splits every digit off first; the import
knows the byte-level part only, and then "x  1" gets other tokens than in training."""


def convert(gguf: Path, target: Path) -> None:
    """Write config.json, model.safetensors, generation_config.json and tokenizer of `gguf`.

    Raises:
        Exception: anything that the readers stumble over in a broken file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": gguf.parent,
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    pre = _read_field(gguf, "tokenizer.ggml.pre")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if pre in DIGIT_SPLITTING:
        _split_digits(tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The weights are plain from here on: without this, loading would look for the GGUF file.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _read_field(gguf: Path, name: str) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(str(gguf)).get_field(name)
    return None if field is None else str(field.contents())


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def main() -> None:
    gguf, target = sys.argv[1:]
    # A header may ask for any number of layers: this process fails then, and no other one.
    size_max = ADDRESS_BYTES + ADDRESS_BYTES_PER_BYTE * Path(gguf).stat().st_size
    resource.setrlimit(resource.RLIMIT_AS, (size_max, size_max))
    try:
        convert(Path(gguf), Path(target))
    # The parent reports the last line; a broken file makes the readers raise anything.
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}".replace("\n", " "))


if __name__ == "__main__":
    main()
