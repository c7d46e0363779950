"""Which cores, GPUs and configs the roles of `pdrt up` get."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.cli.cores import Share, ranges, share_cores
from pdrt.cli.deployment import child_environment, deployment_of, served_name, visible_gpus
from pdrt.cli.up import reachable
from pdrt.cli.validate import validate
from pdrt.config import ApiConfig, DeviceConfig, ModelConfig, ObserveConfig, UpConfig
from pdrt.errors import ConfigError
from pdrt.model.resources import parse_id_list, rank_count

TWO = [Share((0,), 1), Share((1,), 1)]


def test_two_cores_are_one_each() -> None:
    assert share_cores((0, 1), None, 2) == TWO


def test_neighbours_stay_together_and_none_is_left_over() -> None:
    assert share_cores(tuple(range(8)), None, 2) == [Share((0, 1, 2, 3), 4), Share((4, 5, 6, 7), 4)]
    assert share_cores((0, 1, 2, 3, 4), None, 2) == [Share((0, 1), 2), Share((2, 3, 4), 3)]


def test_fewer_cores_than_workers_are_taken_in_turn() -> None:
    assert share_cores((3,), None, 2) == [Share((3,), 1), Share((3,), 1)]


def test_under_a_quota_threads_are_limited_and_nobody_is_pinned() -> None:
    assert share_cores(tuple(range(64)), 4.0, 2) == [Share((), 2), Share((), 2)]
    assert share_cores(tuple(range(64)), 0.5, 2) == [Share((), 1), Share((), 1)]
    assert share_cores((0, 1), 2.0, 2) == TWO


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 9))
def test_shares_cover_all_cores_once_when_there_are_enough(cpus: set[int], workers: int) -> None:
    shares = share_cores(tuple(sorted(cpus)), None, workers)
    assert len(shares) == workers
    dealt = [cpu for share in shares for cpu in share.cpus]
    assert sorted(dealt) == sorted(cpus) or len(cpus) < workers
    for share in shares:
        assert parse_id_list(ranges(share.cpus), "--cpus") == share.cpus


def test_configs_of_the_roles() -> None:
    up = UpConfig(
        host="0.0.0.0",
        port=9000,
        worker_port=9001,
        api=ApiConfig(api_key=("k",)),
        observe=ObserveConfig(log_level="debug"),
    )
    deployment = deployment_of(up, Path("/models/smol"), TWO, gpus=())
    assert tuple(deployment.configs) == ("gateway", "prefill-0", "decode-0")
    gateway = deployment.gateway
    assert (gateway.host, gateway.port, gateway.api.api_key) == ("0.0.0.0", 9000, ("k",))
    assert (gateway.worker_host, gateway.worker_port) == ("127.0.0.1", 9001)
    assert (gateway.model, gateway.served_model_name) == ("/models/smol", "smollm2-135m-instruct")
    assert gateway.cpus == "0-1", "where there is time"
    validate(gateway, has_cuda=False)
    decode = deployment.workers["decode-0"]
    assert (decode.host, decode.port, decode.observe.log_level) == ("127.0.0.1", 0, "debug")
    assert decode.gateway == ("127.0.0.1:9001",)
    assert (decode.model.model, decode.device.cpus, decode.device.threads) == (
        "/models/smol",
        "1",
        1,
    )
    validate(decode, has_cuda=False)


def test_workers_that_meet_on_a_gpu_split_its_memory() -> None:
    up = UpConfig(model=ModelConfig(gpu_memory_utilization=0.8))
    workers = deployment_of(up, Path("/m"), TWO, gpus=(0,)).workers
    assert {w.device.gpus for w in workers.values()} == {"0"}
    assert {w.model.gpu_memory_utilization for w in workers.values()} == {0.4}
    workers = deployment_of(up, Path("/m"), TWO, gpus=(2, 3)).workers
    assert [w.device.gpus for w in workers.values()] == ["2", "3"]
    assert {w.model.gpu_memory_utilization for w in workers.values()} == {0.8}


def test_given_threads_hold_for_each_worker() -> None:
    up = UpConfig(device=DeviceConfig(threads=3))
    workers = deployment_of(up, Path("/m"), TWO, gpus=()).workers
    assert {w.device.threads for w in workers.values()} == {3}


def test_the_served_name(tmp_path: Path) -> None:
    assert served_name(ModelConfig(model="org/name")) == "org/name"
    assert served_name(ModelConfig(model=str(tmp_path))) == tmp_path.name
    assert served_name(ModelConfig(model=str(tmp_path), served_model_name="x")) == "x"


def test_children_do_not_see_our_variables() -> None:
    environment = child_environment({"PDRT_PORT": "1", "PATH": "/bin"})
    assert environment == {"PATH": "/bin", "PYTHONUNBUFFERED": "1"}


def test_a_worker_of_several_ranks_gets_a_gpu_for_each() -> None:
    up = UpConfig(
        model=ModelConfig(gpu_memory_utilization=0.8),
        device=DeviceConfig(tensor_parallel_size=2),
    )
    workers = deployment_of(up, Path("/m"), TWO, gpus=(0, 1, 2, 3)).workers
    assert [w.device.gpus for w in workers.values()] == ["0,1", "2,3"]
    assert {w.device.tensor_parallel_size for w in workers.values()} == {2}
    assert {w.model.gpu_memory_utilization for w in workers.values()} == {0.8}
    workers = deployment_of(up, Path("/m"), TWO, gpus=(0, 1)).workers
    assert {w.device.gpus for w in workers.values()} == {"0,1"}
    assert {w.model.gpu_memory_utilization for w in workers.values()} == {0.4}
    with pytest.raises(ConfigError, match="1 GPUs are here, and a rank takes one"):
        deployment_of(up, Path("/m"), TWO, gpus=(0,))
    workers = deployment_of(up, Path("/m"), TWO, gpus=()).workers
    assert {w.device.gpus for w in workers.values()} == {None}, "ranks on CPUs share cores"


def test_named_devices_are_shared_out_evenly() -> None:
    """All of them are used, without a word about tensor parallelism."""
    up = UpConfig(device=DeviceConfig(gpus="0-7"))
    workers = deployment_of(up, Path("/m"), TWO, gpus=tuple(range(8))).workers
    assert [w.device.gpus for w in workers.values()] == ["0,1,2,3", "4,5,6,7"]
    assert [rank_count(w.device) for w in workers.values()] == [4, 4]
    assert {w.device.cpus for w in workers.values()} == {None}, "no core for each rank"
    few = UpConfig(device=DeviceConfig(gpus="3"))
    workers = deployment_of(few, Path("/m"), TWO, gpus=(3,)).workers
    assert [w.device.gpus for w in workers.values()] == ["3", "3"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "words"),
    [
        (
            "0-6",
            None,
            "names 7 devices, and 2 workers of 1 ranks use 2: name 2, or as many for each",
        ),
        ("0-7", 2, r"names 8 devices, and 2 workers of 2 ranks use 4: name 4, or as many for each"),
    ],
)
def test_devices_that_nobody_would_use_are_refused(
    gpus: str, ranks: int | None, words: str
) -> None:
    up = UpConfig(device=DeviceConfig(gpus=gpus, tensor_parallel_size=ranks))
    with pytest.raises(ConfigError, match=f"--gpus {gpus} {words}"):
        deployment_of(up, Path("/m"), TWO, gpus=parse_id_list(gpus, "--gpus"))


def test_devices_that_are_there_need_not_all_be_used() -> None:
    up = UpConfig(device=DeviceConfig(device="cuda"))
    workers = deployment_of(up, Path("/m"), TWO, gpus=tuple(range(8))).workers
    assert [w.device.gpus for w in workers.values()] == ["0", "1"]


def test_ranks_keep_to_their_workers_cores_where_each_has_one() -> None:
    up = UpConfig(device=DeviceConfig(tensor_parallel_size=2))
    workers = deployment_of(up, Path("/m"), TWO, gpus=()).workers
    assert {w.device.cpus for w in workers.values()} == {None}, "any, as there are too few"
    named = UpConfig(device=DeviceConfig(tensor_parallel_size=2, cpus="0-1"))
    workers = deployment_of(named, Path("/m"), TWO, gpus=()).workers
    assert {w.device.cpus for w in workers.values()} == {"0-1"}
    four = [Share((0, 1), 2), Share((2, 3), 2)]
    workers = deployment_of(up, Path("/m"), four, gpus=()).workers
    assert [w.device.cpus for w in workers.values()] == ["0-1", "2-3"]


@pytest.mark.parametrize(("mask", "gpus"), [("", ()), ("3", (0,)), ("4,5", (0, 1))])
def test_gpus_are_counted_through_the_mask(mask: str, gpus: tuple[int, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": mask}) == gpus


def test_an_address_of_any_interface_is_shown_as_one_that_can_be_dialled() -> None:
    assert reachable("http://0.0.0.0:80") == "http://127.0.0.1:80"
    assert reachable("http://10.0.0.1:80") == "http://10.0.0.1:80"
