"""A CPU that computes in any order is refused where hosts have collectives in common."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from grain_shard import ShardingError
from grain_shard.collectives import require_order


def devices(platform, *hosts):
    return [SimpleNamespace(platform=platform, process_index=host) for host in hosts]


@pytest.fixture(params=[True, False], ids=["in any order", "in order"])
def mixes_up(request, monkeypatch):
    # Where the tests run, devices are there already; only what is said of them can be changed.
    monkeypatch.setattr(jax.config, "read", lambda name: request.param)
    return request.param


def test_a_single_cpu_among_several_hosts_has_to_keep_the_order(mixes_up):
    remedy = r'jax.config.update\("jax_cpu_enable_async_dispatch"'
    with pytest.raises(ShardingError, match=remedy) if mixes_up else contextlib.nullcontext():
        require_order(devices("cpu", 0, 1))


@pytest.mark.parametrize(
    "others",
    [devices("cpu", 0), devices("cpu", 0, 0, 1, 1), devices("tpu", 0, 1), devices("cpu", 1, 2)],
    ids=["one host", "several CPUs a host", "accelerators", "other hosts"],
)
@pytest.mark.usefixtures("mixes_up")
def test_all_others_may_go_on(others):
    require_order(others)


def test_a_jax_without_the_option_is_asked_nothing(monkeypatch):
    monkeypatch.setattr(jax.config, "read", mock.Mock(side_effect=AttributeError))
    require_order(devices("cpu", 0, 1))
