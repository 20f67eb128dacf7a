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


TWO_HOSTS = devices("cpu", 0, 1)


@pytest.mark.parametrize(
    ("of_mesh", "in_any_order", "is_refused"),
    [
        (TWO_HOSTS, lambda name: True, True),
        (TWO_HOSTS, lambda name: False, False),
        (TWO_HOSTS, mock.Mock(side_effect=AttributeError), False),  # a JAX without the option
        *(
            (of_mesh, lambda name: True, False)
            for of_mesh in (
                devices("cpu", 0),
                devices("cpu", 0, 0, 1, 1),  # several CPUs a host
                devices("tpu", 0, 1),
                devices("cpu", 1, 2),  # of other hosts
            )
        ),
    ],
)
def test_a_single_cpu_of_each_host_has_to_keep_the_order(
    of_mesh, in_any_order, is_refused, monkeypatch
):
    # Where the tests run, devices are there already; only what is said of them can be changed.
    monkeypatch.setattr(jax.config, "read", in_any_order)
    remedy = r'jax.config.update\("jax_cpu_enable_async_dispatch"'
    with pytest.raises(ShardingError, match=remedy) if is_refused else contextlib.nullcontext():
        require_order(of_mesh)
