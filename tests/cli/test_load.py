"""One definition, three sources: precedence, nearest match, wrong values, the round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdrt.cli.flags import EPILOG, parse_request, role_parser
from pdrt.cli.load import dump_toml
from pdrt.cli.options import Option, bare_type, options_of
from pdrt.config import GatewayConfig, UpConfig, WorkerConfig
from pdrt.errors import ConfigError

ROLES: list[tuple[str, type[msgspec.Struct]]] = [
    ("up", UpConfig),
    ("decode", WorkerConfig),
    ("gateway", GatewayConfig),
]


def load(*arguments: str, **environment: str) -> WorkerConfig:
    return parse_request("decode", WorkerConfig, arguments, environment).config


def toml_file(folder: Path, text: str) -> str:
    path = folder / "settings.toml"
    path.write_text(text)
    return str(path)


def test_nothing_given_is_the_default() -> None:
    assert load() == WorkerConfig()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = toml_file(tmp_path, "max_num_seqs = 3\npage_size = 3\nqueue_max = 3\n")
    config = load(
        "--config", path, "--max-num-seqs", "1", PDRT_MAX_NUM_SEQS="2", PDRT_PAGE_SIZE="2"
    )
    assert config.scheduler.max_num_seqs == 1
    assert config.model.page_size == 2
    assert config.scheduler.queue_max == 3
    assert config.scheduler.max_num_batched_tokens == 512


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    assert load(PDRT_CONFIG=toml_file(tmp_path, "port = 7")).port == 7


@pytest.mark.parametrize("form", ["--page-size=8", "--block-size=8", "--page_size=8"])
def test_aliases_and_underscores_of_flags(form: str) -> None:
    assert load(form).model.page_size == 8


def test_aliases_in_file_and_environment(tmp_path: Path) -> None:
    assert load("--config", toml_file(tmp_path, "block_size = 8")).model.page_size == 8
    assert load(PDRT_BLOCK_SIZE="8").model.page_size == 8


def test_a_setting_given_by_both_its_names_is_refused(tmp_path: Path) -> None:
    path = toml_file(tmp_path, "block_size = 8\npage_size = 16")
    with pytest.raises(ConfigError, match=r"block_size and .*page_size are the same setting"):
        load("--config", path)


def test_gateway_repeats_and_splits_at_commas(tmp_path: Path) -> None:
    assert load("--gateway", "a:1", "--gateway", "b:2,c:3").gateway == ("a:1", "b:2", "c:3")
    assert load(PDRT_GATEWAY="a:1, b:2").gateway == ("a:1", "b:2")
    assert load("--config", toml_file(tmp_path, 'gateway = ["a:1", "b:2"]')).gateway == (
        "a:1",
        "b:2",
    )


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(PDRT_MAX_NUM_SEQS="") == WorkerConfig()


def test_text_is_taken_as_it_stands() -> None:
    assert load(PDRT_MODEL="null", PDRT_SERVED_MODEL_NAME="null").model.served_model_name == "null"


def test_unknown_names_are_refused_with_the_nearest_match(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-num-seq; did you mean --max-num-seqs"):
        load("--max-num-seq", "4")
    with pytest.raises(ConfigError, match="PDRT_MAX_NUM_SEQ; did you mean PDRT_MAX_NUM_SEQS"):
        load(PDRT_MAX_NUM_SEQ="4")
    path = toml_file(tmp_path, "max_num_seq = 4")
    with pytest.raises(ConfigError, match=r"settings\.toml: .*max_num_seq; did you mean max_num_s"):
        load("--config", path)


def test_names_of_other_roles(tmp_path: Path) -> None:
    """One environment may serve all roles; a file and a command line are one role's."""
    assert load(PDRT_PREFILL_WORKERS="2") == WorkerConfig()
    with pytest.raises(ConfigError, match="prefill_workers is for another role"):
        load("--config", toml_file(tmp_path, "prefill_workers = 2"))
    with pytest.raises(ConfigError, match="unknown flag --prefill-workers"):
        load("--prefill-workers", "2")


def test_wrong_types_name_key_and_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: 'x' is not a whole number"):
        load("--max-num-seqs", "x")
    with pytest.raises(ConfigError, match="variable PDRT_SILENCE_SECONDS: 'x' is not a number"):
        load(PDRT_SILENCE_SECONDS="x")
    with pytest.raises(ConfigError, match=r"settings\.toml: port: '7' is not a whole number"):
        load("--config", toml_file(tmp_path, 'port = "7"'))
    with pytest.raises(ConfigError, match="gateway: 'a:1' is not a list of texts"):
        load("--config", toml_file(tmp_path, 'gateway = "a:1"'))
    with pytest.raises(ConfigError, match="--dtype: 'int8' is not one of auto, float32"):
        load("--dtype", "int8")
    with pytest.raises(ConfigError, match="--page-size: '0' is out of range, must be >= 1"):
        load("--page-size", "0")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load("--config", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="not valid TOML"):
        load("--config", toml_file(tmp_path, "port ="))
    with pytest.raises(ConfigError, match=r"table \[scheduler\]: write its keys at the top"):
        load("--config", toml_file(tmp_path, "[scheduler]\nmax_num_seqs = 1"))


def test_command_lines_that_are_no_flags() -> None:
    with pytest.raises(ConfigError, match="unexpected argument 'serve'"):
        load("serve")
    with pytest.raises(ConfigError, match="--port: expected one argument"):
        load("--port")


def test_a_boolean_flag_may_stand_alone() -> None:
    class Switch(msgspec.Struct, frozen=True):
        verbose: bool = False

    for arguments, value in ([], False), (["--verbose"], True), (["--verbose", "false"], False):
        assert parse_request("x", Switch, arguments, {}).config.verbose is value
    assert parse_request("x", Switch, ["--verbose=1"], {}).config.verbose is True
    with pytest.raises(ConfigError, match="--verbose: 'maybe' is not true or false"):
        parse_request("x", Switch, ["--verbose", "maybe"], {})


@pytest.mark.parametrize(("role", "config_type"), ROLES)
def test_every_option_has_help_flag_and_variable(
    role: str, config_type: type[msgspec.Struct]
) -> None:
    text = role_parser(role, config_type).format_help()
    options = options_of(config_type)
    for option in options.values():
        assert option.help, f"{option.key} has no description"
        assert f"{option.flag} " in text
        assert option.variable == "PDRT_" + option.key.upper()
        if type(None) in get_args(option.type) or option.default is None:
            assert option.default is None  # else a file could not say what print-config shows
    names = [name for option in options.values() for name in option.names]
    assert len(names) == len(set(names))
    assert EPILOG in text


def values_of(option: Option) -> st.SearchStrategy[Any]:
    bare = bare_type(option.type)
    text = st.text(st.characters(exclude_categories=["Cs"]))
    if get_origin(bare) is Literal:
        values: st.SearchStrategy[Any] = st.sampled_from(get_args(bare))
    elif option.repeats:
        values = st.lists(text).map(tuple)
    else:
        values = {
            int: st.integers(1, 65535),
            float: st.floats(0.001, 1.0),
            bool: st.booleans(),
            str: text,
        }[bare]
    return st.none() | values if option.default is None else values


@pytest.mark.parametrize(("role", "config_type"), ROLES)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_print_config_loads_back_to_the_same(
    role: str, config_type: type[msgspec.Struct], data: st.DataObject, tmp_path: Path
) -> None:
    options = options_of(config_type)
    tree: dict[str, Any] = {}
    for key in data.draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=12)):
        node = tree
        for name in options[key].path[:-1]:
            node = node.setdefault(name, {})
        node[options[key].path[-1]] = data.draw(values_of(options[key]), label=key)
    config = msgspec.convert(tree, config_type)
    path = toml_file(tmp_path, dump_toml(config))
    assert parse_request(role, config_type, ["--config", path], {}).config == config
