"""Identities: equal for equal models, different for anything that changes an answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdrt.config import ModelConfig
from pdrt.errors import ModelError
from pdrt.model.identity import base_digest, read_identity, read_served_identity
from pdrt.model.placement import limit_identity
from pdrt.sampling import SamplingDefaults
from tests.model.conftest import TinyModel
from tests.model.tiny import EOS_ID


@pytest.fixture
def directory(tmp_path: Path, tiny_model: TinyModel) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "tiny"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_it_says(directory: Path) -> None:
    identity = read_identity(directory)
    assert identity.name == "tiny"
    assert identity.max_model_len == 512
    assert identity.eos_token_ids == (EOS_ID,)
    assert identity.architecture == "LlamaForCausalLM"
    assert len(identity.digest) == 32


def test_digest_ignores_who_wrote_the_files(directory: Path) -> None:
    before = read_identity(directory).digest
    edit(directory / "config.json", transformers_version="9.9", _name_or_path="elsewhere")
    assert read_identity(directory).digest == before


def test_digest_covers_configuration_tokenizer_weights_and_format(directory: Path) -> None:
    digests = [read_identity(directory).digest, read_identity(directory, "dummy").digest]
    edit(directory / "config.json", rms_norm_eps=0.5)
    digests.append(read_identity(directory).digest)
    edit(directory / "tokenizer_config.json", added=True)
    digests.append(read_identity(directory).digest)
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    # The same shapes, another number: a fine-tune, as far as one differs in every tensor.
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    weights.write_bytes(content)
    digests.append(read_identity(directory).digest)
    assert len(set(digests)) == len(digests)


def test_a_gateway_knows_workers_with_weights_and_with_dummies(directory: Path) -> None:
    identity, digests = read_served_identity(directory)
    assert identity == read_identity(directory)
    assert digests == (identity.digest, read_identity(directory, "dummy").digest)
    (directory / "model.safetensors").unlink()
    dummy, only = read_served_identity(directory)
    assert dummy == read_identity(directory, "dummy")
    assert only == digests[1:]


def test_what_a_worker_does_to_the_model_follows_the_digest(directory: Path) -> None:
    """Never paired with one that does not, and still of the gateway's model."""
    identity = read_identity(directory)
    plain = limit_identity(identity, ModelConfig())
    assert plain.digest == identity.digest == base_digest(plain.digest)
    quantized = limit_identity(identity, ModelConfig(quantization="int8"))
    assert quantized.digest == f"{identity.digest}+int8"
    assert base_digest(quantized.digest) == identity.digest
    stretched = replace(identity, longrope_limit=256)
    lengths = (None, 256, 257)
    digests = [limit_identity(stretched, ModelConfig(max_model_len=n)).digest for n in lengths]
    assert digests == [f"{identity.digest}{end}" for end in ("+longrope", "", "+longrope")]


def test_pointers_of_git_lfs_are_told(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (directory / "model.safetensors").write_text(pointer)
    with pytest.raises(ModelError, match="git lfs pull"):
        read_identity(directory)


def test_generation_config_names_the_ends(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=[2, 5])
    assert read_identity(directory).eos_token_ids == (2, 5)
    edit(directory / "generation_config.json", eos_token_id=None)
    assert read_identity(directory).eos_token_ids == (EOS_ID,)
    (directory / "generation_config.json").unlink()
    assert read_identity(directory).eos_token_ids == (EOS_ID,)


def test_broken_files_are_named(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors"):
        read_identity(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_identity(directory)


def test_reading_an_identity_imports_no_torch(directory: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pdrt.model.identity import read_identity; "
        "import pdrt.model.fetch; read_identity(Path(sys.argv[1])); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)


def test_recommended_sampling_is_read_and_nonsense_is_left_out(directory: Path) -> None:
    assert read_identity(directory).sampling == SamplingDefaults()
    config = directory / "generation_config.json"
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    config.write_text(json.dumps({**given, "do_sample": True, "min_p": "x"}))
    assert read_identity(directory).sampling == SamplingDefaults(**given)
    config.write_text(json.dumps({"temperature": -1, "top_k": None, "top_p": 0}))
    assert read_identity(directory).sampling == SamplingDefaults()
