"""The plan of a job, held against the real topologies of TPUs.

Expected rows come from `NamedSharding.devices_indices_map`, which no code of this package asks.
Against jobs that run: test_hosts_same_batches.py.
"""

import dataclasses
import re
import sys
from collections import Counter
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import GrainShardError, ShardingError, hosts_mesh, topology_mesh
from grain_shard.training import HardwareType

needs_libtpu = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="libtpu comes with the plan extra, on Linux on x86-64"
)


def planned(axes, hosts, devices_per_host, spec=None, **options):
    mesh = hosts_mesh(axes, hosts=hosts, devices_per_host=devices_per_host)
    return grain_shard.plan(mesh, spec, **options)


# Real topologies of five kinds of chips.
TOPOLOGIES = [
    # name, devices, hosts, devices of a host, kind
    ("v4:2x2x2", 8, 2, 4, HardwareType.TPU_V4),
    ("v4:4x4x4", 64, 16, 4, HardwareType.TPU_V4),
    ("v5e:4x4", 16, 4, 4, HardwareType.TPU_V5E),
    ("v5e:16x16", 256, 64, 4, HardwareType.TPU_V5E),
    ("v5p:2x2x4", 16, 4, 4, HardwareType.TPU_V5P),
    ("v5p:4x4x8", 128, 32, 4, HardwareType.TPU_V5P),
    ("v6e:8x8", 64, 16, 4, HardwareType.TPU_V6E),
    ("v6e:16x16", 256, 64, 4, HardwareType.TPU_V6E),
    ("tpu7x:2x2x2", 16, 2, 8, HardwareType.TPU7X),
    ("tpu7x:4x4x4", 128, 16, 8, HardwareType.TPU7X),
]


def rows_of_devices(mesh, spec, num_rows):
    """By host, the rows on its devices; from JAX alone."""
    held = {}
    index_of = NamedSharding(mesh, spec).devices_indices_map((num_rows,))
    for device, index in index_of.items():
        held.setdefault(device.process_index, set()).update(range(*index[0].indices(num_rows)))
    return held


def rows_of(host):
    return [row for start, stop in host.rows for row in range(start, stop)]


def assert_exact(plan, mesh, spec):
    """The rows of the hosts are those of their devices."""
    assert plan.num_devices == mesh.size
    size = plan.reads.padded_batch_size
    held = rows_of_devices(mesh, spec, size)
    read = {host.host: rows_of(host) for host in plan.reads.hosts}
    assert read == {host: sorted(rows) for host, rows in sorted(held.items())}
    assert plan.reads.amplification == pytest.approx(sum(map(len, held.values())) / size)
    groups = set(plan.hosts_with_the_same_rows)
    for hosts in groups:
        assert len({frozenset(held[host]) for host in hosts}) == 1 < len(hosts)
    apart = set(held) - {host for hosts in groups for host in hosts}
    assert len({frozenset(rows) for rows in held.values()}) == len(groups) + len(apart)


@needs_libtpu
class TestTopologies:
    @pytest.mark.parametrize(("name", "devices", "hosts", "per_host", "chip"), TOPOLOGIES)
    def test_devices_hosts_and_kind(self, name, devices, hosts, per_host, chip):
        mesh = topology_mesh(name, {"data": devices})
        plan = grain_shard.plan(mesh, global_batch_size=devices, num_records=devices)
        assert (plan.num_devices, plan.num_hosts, plan.hardware) == (devices, hosts, chip)
        assert plan.warnings == (), "of few rows, only a given chip is a reason to warn"
        assert set(Counter(d.process_index for d in mesh.devices.flat).values()) == {per_host}
        assert_exact(plan, mesh, P("data"))

    @settings(deadline=None, max_examples=60)
    @given(data=st.data())
    def test_any_mesh_on_them_is_planned_exactly(self, data):
        name, count, *_ = data.draw(st.sampled_from(TOPOLOGIES))
        devices = topology_mesh(name, {"all": count}).devices
        factors = [2] * (count.bit_length() - 1)  # all of them are powers of two
        cuts = sorted(data.draw(st.lists(st.integers(0, len(factors)), min_size=2, max_size=2)))
        shape = [2 ** (b - a) for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]
        order = data.draw(st.sampled_from(["as jax.make_mesh", "transposed", "shuffled"]))
        if order == "shuffled":
            seed = data.draw(st.integers(0, 100))
            devices = np.random.default_rng(seed).permutation(devices)
        devices = devices.reshape(shape)
        if order == "transposed":
            devices = devices.T
        mesh = Mesh(devices, ("a", "b", "c"))
        axes = data.draw(st.lists(st.sampled_from("abc"), unique=True))
        spec = P(tuple(axes))
        batch = data.draw(st.integers(1, 3 * count))
        plan = grain_shard.plan(mesh, spec, global_batch_size=batch, num_records=5 * batch + 1)
        assert_exact(plan, mesh, spec)
        records = [plan.records(host.host, 5) for host in plan.reads.hosts]
        assert set(np.concatenate(records).tolist()) == {5 * batch}

    def test_the_order_of_devices_is_that_of_jax_make_mesh(self):
        from jax.experimental import topologies

        mesh = topology_mesh("v5e:4x4", {"data": 8, "model": 2})
        described = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
        made = jax.make_mesh((8, 2), ("data", "model"), devices=described.devices)
        coordinates = np.vectorize(lambda d: tuple(d.coords), otypes=[object])
        assert coordinates(mesh.devices).tolist() == coordinates(made.devices).tolist()

    def test_the_largest_slice(self):
        mesh = topology_mesh("v5p:16x16x24", {"data": 384, "model": 16})
        plan = grain_shard.plan(mesh, global_batch_size=12288, num_records=1_000_000)
        assert (plan.num_devices, plan.num_hosts) == (6144, 1536)
        assert_exact(plan, mesh, P("data"))

    @pytest.mark.parametrize(
        ("name", "slices", "axes", "message"),
        [
            ("v5e:3x7", 1, {"data": 21}, "not know the topology 'v5e:3x7'"),
            ("v9:2x2", 1, {"data": 4}, "not know the topology 'v9:2x2'"),
            ("v5e", 1, {"data": 4}, "not know the topology 'v5e'"),
            ("v5e:2x2", 1, {"data": 5}, "a mesh of 5 devices, but there are 4"),
            ("v5e:2x2", 1, {"data": 4, "model": 0}, "mesh axis model=0"),
            ("v6e:16x16", 1, {"data": 128, "model": 2}, "jax.make_mesh finds no order of"),
            ("v5p:2x2x1", 0, {"data": 8}, "slices=0"),
            ("v5p:2x2x1", 2, {"data": 4}, "a mesh of 4 devices, but there are 8"),
        ],
    )
    def test_refusals(self, name, slices, axes, message):
        with pytest.raises(ShardingError, match=message):
            topology_mesh(name, axes, slices=slices)

    @pytest.mark.parametrize(
        ("name", "slices", "axes", "of_slices"),
        [
            # The slice of the devices along each axis, all others at 0.
            ("v5p:2x2x1", 2, {"data": 4, "model": 2}, [[0, 0, 1, 1], [0, 0]]),
            ("v5p:2x2x1", 4, {"replica": 2, "data": 8}, [[0, 2], [0, 0, 0, 0, 1, 1, 1, 1]]),
            ("v4:2x2x1", 2, {"replica": 2, "data": 4}, [[0, 1], [0, 0, 0, 0]]),
            ("v5p:2x2x1", 3, {"data": 2, "model": 6}, [[0, 0], [0, 0, 1, 1, 2, 2]]),
            ("tpu7x:2x2x1", 3, {"data": 24}, [[0] * 8 + [1] * 8 + [2] * 8]),
            ("v5e:4x4", 1, {"data": 16}, [[0] * 16]),
        ],
    )
    def test_several_slices_lie_along_the_first_axes(self, name, slices, axes, of_slices):
        mesh = topology_mesh(name, axes, slices=slices)
        assert dict(mesh.shape) == axes
        numbers = np.vectorize(lambda device: getattr(device, "slice_index", 0))(mesh.devices)
        for dim, expected in enumerate(of_slices):
            along = np.moveaxis(numbers, dim, 0).reshape(len(expected), -1)[:, 0]
            assert along.tolist() == expected
        over_all = P(tuple(axes))
        plan = grain_shard.plan(mesh, over_all, global_batch_size=48, num_records=48)
        assert_exact(plan, mesh, over_all)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(GrainShardError, match=r'pip install "grain-shard\[plan\]"'):
        topology_mesh("v5e:4x4", {"data": 16})


ROWS, MODEL = {"data": 16}, {"data": 4, "model": 4}  # of 8 hosts with 2 devices each


class TestFigures:
    @pytest.mark.parametrize(
        ("axes", "hosts", "batch", "records", "remainder", "steps", "padding", "dropped", "rows"),
        [
            ({"data": 8}, 2, 8, 24, "pad", 3, 0, 0, 1),
            ({"data": 8}, 2, 8, 22, "pad", 3, 2, 0, 1),
            ({"data": 8}, 2, 8, 22, "drop", 2, 0, 6, 1),
            ({"data": 8}, 2, 6, 22, "pad", 4, 10, 0, 1),
            ({"data": 8}, 2, 20, 5, "pad", 1, 19, 0, 3),
            ({"data": 4, "model": 2}, 4, 8, 24, "error", 3, 0, 0, 2),
        ],
    )
    def test_an_epoch(self, axes, hosts, batch, records, remainder, steps, padding, dropped, rows):
        sizes = {"global_batch_size": batch, "num_records": records, "remainder": remainder}
        plan = planned(axes, hosts, 8 // hosts, **sizes)
        assert plan.device_bytes is None
        assert plan.to_dict()["reads"]["hosts"][0]["bytes_per_step"] is None
        with pytest.raises(ShardingError, match=f"host {hosts} is not in the mesh"):
            plan.records(hosts, 0)
        assert plan.steps_per_epoch == steps
        assert plan.padded_rows_per_epoch == padding
        assert plan.dropped_records_per_epoch == dropped
        assert plan.rows_per_device == rows
        read = sum(host.rows_per_epoch for host in plan.reads.hosts)
        assert read == (records - dropped) * plan.reads.amplification

    @pytest.mark.parametrize(
        ("spec", "device_bytes"),
        [
            (P("data"), 1000 * 64 // 4),
            (P("model"), 1000 * 64 // 2),
            (P(("data", "model")), 1000 * 64 // 8),
            (P(), 1000 * 64),
            ({"a": P("data"), "b": P()}, 1000 * 64),
        ],
    )
    def test_the_bytes_of_a_device(self, spec, device_bytes):
        sizes = {"global_batch_size": 64, "num_records": 640, "record_bytes": 1000}
        plan = planned({"data": 4, "model": 2}, 2, 4, spec, **sizes)
        assert plan.device_bytes == device_bytes

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"global_batch_size": 0}, "global_batch_size=0"),
            ({"num_records": -1}, "num_records=-1"),
            ({"num_records": 0}, "no batch"),
            ({"record_bytes": 0}, "record_bytes=0"),
            ({"spec": P("model")}, "'model', which does not exist"),
            ({"global_batch_size": 6, "remainder": "drop"}, "6 rows does not split into 8 shards"),
            ({"num_records": 5, "remainder": "drop"}, "leaves no batch"),
            ({"num_records": 9, "remainder": "error"}, "do not fill the last batch"),
        ],
    )
    def test_refusals(self, options, error):
        options = {"global_batch_size": 8, "num_records": 80} | options
        with pytest.raises(ShardingError, match=error) as caught:
            planned({"data": 8}, 2, 4, **options)
        if "=" not in error:
            assert re.search(r"mesh: +data=8\n", str(caught.value))

    def test_the_mesh_of_this_process(self, mesh):
        plan = grain_shard.plan(mesh, global_batch_size=8, num_records=80)
        assert (plan.num_hosts, plan.hardware) == (1, HardwareType.CPU)
        device = grain_shard.plan(jax.devices()[0], global_batch_size=8, num_records=80)
        assert (device.num_devices, device.rows_per_device, device.specs) == (1, 8, ())


H100 = {"hardware": HardwareType.H100}
WARNINGS = [
    # On 8 hosts of 2 devices each: the mesh, the global batch, the records, options, the warnings.
    (ROWS, 64, 6400, {}, []),
    (ROWS, 64, 6401, {}, []),  # 63 of 6464 rows are padding: 0.97%
    (ROWS, 64, 4801, {}, ["1.3% of an epoch's rows are padding of its last"]),
    (ROWS, 64, 10, {}, ["a batch of 64 rows takes more than the 10 records"]),
    (ROWS, 64, 127, {"remainder": "drop"}, ["49.6% of the records are in no batch"]),
    (ROWS, 63, 6300, {}, ["1 rows of padding.*63 rows do not split into 16 shards.*64 rows"]),
    (ROWS, 8, 8000, {}, ["8 rows of padding", "4 of 8 hosts hold only rows of padding"]),
    (MODEL, 64, 6400, {}, ["each row is read 2 times, .* so that a host has all devices of that"]),
    (ROWS, 64, 6400, H100, ["rows per device: .* 4 is below minimum recommended 64 for h100"]),
    (ROWS, 1600, 16000, H100, ["Batch size 100 is below critical size 298"]),
    (ROWS, 16 * 320, 51200, H100, []),
]


@pytest.mark.parametrize(("axes", "batch", "records", "options", "expected"), WARNINGS)
def test_warnings(axes, batch, records, options, expected):
    plan = planned(axes, 8, 2, global_batch_size=batch, num_records=records, **options)
    assert len(plan.warnings) == len(expected), plan.warnings
    for warning, pattern in zip(plan.warnings, expected, strict=True):
        assert re.search(pattern, warning), warning
    assert str(plan).count("warning: ") == len(expected)


def test_a_plan_shows_itself():
    plan = planned(MODEL, 8, 2, global_batch_size=64, num_records=1000)
    assert repr(plan) == str(plan)
    shown = plan._repr_mimebundle_((), ())
    assert shown["text/html"].startswith("<pre style=")
    assert "16 steps for 1,000 records" in shown["text/html"]
    assert "#000000" not in shown["text/html"], "which a dark page hides"
    assert "\x1b" not in shown["text/plain"]
    assert "each row on 2 hosts; at most 16 rows of a host in a step" in shown["text/plain"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.reads = None
