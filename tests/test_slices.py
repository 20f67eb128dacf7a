"""Several slices: rows are read once in each that needs them, and never leave it.

The compiler of TPUs, which libtpu has, tells which network a program uses: what goes between slices
becomes a transfer between hosts, with "megascale" in its name.
"""

import dataclasses
import re
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from grain_shard import ShardingError
from grain_shard.sharding.reshard import move_to
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.slices import CutMesh, slice_of
from grain_shard.tools.planning.topology import topology_mesh
from tests.test_plan import needs_libtpu, rows_of_devices


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh and a layout look at, of a device of some slice."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "some chips"
    device_kind: str = "some chip"


def hybrid_mesh(within, between):
    """`create_hybrid_device_mesh` of devices that are not there, with two on a host."""
    per_slice, slices = int(np.prod(within)), int(np.prod(between))
    of_host = min(2, per_slice)
    devices = [Device(i, i // of_host, i // per_slice) for i in range(per_slice * slices)]
    return Mesh(create_hybrid_device_mesh(within, between, devices), tuple("abc"[: len(within)]))


class TestWhereAMeshIsCut:
    @pytest.mark.parametrize(
        ("within", "between", "sizes", "in_slice"),
        [
            # An axis stays as it is if all of it is in a slice,
            ((4, 2), (1, 1), {"a": 4, "b": 2}, ("a", "b")),
            # or if each step along it leads to another.
            ((1, 4), (2, 1), {"a": 2, "b": 4}, ("b",)),
            # Otherwise it is two: between slices, and within.
            ((4, 2), (2, 1), {"a.slices": 2, "a.in_slice": 4, "b": 2}, ("a.in_slice", "b")),
            ((4, 2), (1, 3), {"a": 4, "b.slices": 3, "b.in_slice": 2}, ("a", "b.in_slice")),
            (
                (2, 2),
                (2, 2),
                {"a.slices": 2, "a.in_slice": 2, "b.slices": 2, "b.in_slice": 2},
                ("a.in_slice", "b.in_slice"),
            ),
            ((1, 1), (2, 3), {"a": 2, "b": 3}, ()),
            ((1, 1), (1, 1), {"a": 1, "b": 1}, ("a", "b")),
        ],
    )
    def test_hybrid_meshes(self, within, between, sizes, in_slice):
        mesh = hybrid_mesh(within, between)
        cut = CutMesh.of(mesh)
        assert (dict(cut.mesh.shape), cut.in_slice) == (sizes, in_slice)
        assert cut.num_slices == np.prod(between)
        assert cut.num_slices > 1 or cut.mesh is mesh
        assert list(cut.mesh.devices.flat) == list(mesh.devices.flat)
        assert cut.axes("ba") == tuple(
            part for name in "ba" for part in sizes if part.startswith(name)
        )

    @pytest.mark.parametrize(
        ("slices", "sizes", "in_slice"),
        [
            # No two neighbours are in one slice: nothing is gained by cutting.
            ([0, 1, 0, 1], {"a": 4}, ()),
            # Slices of different sizes: blocks of the largest size that ends with each of them.
            ([0, 0, 0, 0, 1, 1], {"a.slices": 3, "a.in_slice": 2}, ("a.in_slice",)),
            ([0, 0, 1, 1, 0, 0, 1, 1], {"a.slices": 4, "a.in_slice": 2}, ("a.in_slice",)),
        ],
    )
    def test_meshes_in_an_order_of_their_own(self, slices, sizes, in_slice):
        devices = np.array([Device(i, i, s) for i, s in enumerate(slices)])
        cut = CutMesh.of(Mesh(devices, ("a",)))
        assert (dict(cut.mesh.shape), cut.in_slice) == (sizes, in_slice)

    def test_which_slice_a_device_is_in(self):
        assert slice_of(Device(0, 0, 3)) == 3
        assert slice_of(jax.devices()[0]) == 0  # a CPU knows of no slices
        assert slice_of(Device(0, 0, 3, platform="gpu")) == 0  # 3 is of NVLink


SHAPES = st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 2), (4, 1, 2)])


@st.composite
def specs(draw):
    axes = draw(st.permutations("abc"))
    rows, others = sorted(draw(st.tuples(st.integers(0, 3), st.integers(0, 3))))
    return P(tuple(axes[:rows]) or None, *axes[rows:others])


class TestWhoReadsWhat:
    @settings(deadline=None, max_examples=200)
    @given(within=SHAPES, between=SHAPES, of_leaves=st.lists(specs(), min_size=1, max_size=3))
    def test_a_slice_reads_all_that_it_needs_and_no_row_twice(self, within, between, of_leaves):
        mesh = hybrid_mesh(within, between)
        target = ShardingTree.of(mesh, dict(enumerate(of_leaves)))
        rows = 2 * mesh.size
        slices = {device.process_index: device.slice_index for device in mesh.devices.flat}
        needed = {s: set() for s in slices.values()}
        for spec in of_leaves:
            for host, held in rows_of_devices(mesh, P(*spec[:1]), rows).items():
                needed[slices[host]] |= held
        read = {s: Counter() for s in needed}
        for host, layout in target.spread().layouts().items():
            read[slices[host]].update(layout.rows(rows).tolist())
        for s, counts in read.items():
            assert set(counts.values()) == {1}
            assert set(counts) >= needed[s]
            if len(set(of_leaves)) == 1:
                assert set(counts) == needed[s]

    @pytest.mark.parametrize(
        ("within", "between", "spec", "read_by"),
        [
            # The batch axis is divided over slices: each has rows of its own anyway.
            ((4, 2), (2, 1), P("a"), ("a.slices", "a.in_slice", "b")),
            # It is replicated over slices: each reads the whole batch.
            ((1, 4, 2), (2, 1, 1), P("b"), ("b", "c")),
            ((4, 2), (1, 2), P("a"), ("a", "b.in_slice")),
            # The rows of one leaf are divided over slices, those of the other are not.
            ((4, 2), (2, 1), {"x": P("a"), "y": P()}, ("a.in_slice", "b")),
            # The leaves have the division over slices in common, and no more.
            (
                (2, 2, 2),
                (2, 1, 1),
                {"x": P(("a", "b")), "y": P(("a", "c"))},
                ("a.slices", "a.in_slice", "b", "c"),
            ),
        ],
    )
    def test_the_axes_by_which_rows_are_read(self, within, between, spec, read_by):
        read = ShardingTree.of(hybrid_mesh(within, between), spec).spread()
        assert {s.spec for s in read.shardings()} == {P(read_by)}

    def test_auto_reads_once_only_where_that_reads_less(self):
        # A host is a slice: there is no neighbour to have rows from.
        alone = ShardingTree.of(hybrid_mesh((1, 2), (4, 1)), P("b"))
        assert alone.way_to_read("auto", 8) == "needed"
        # Two hosts are one: each reads a half of what both need.
        pairs = ShardingTree.of(hybrid_mesh((2, 2), (4, 1)), P("b"))
        assert pairs.way_to_read("auto", 8) == "once"
        assert next(iter(pairs.spread().layouts().values())).amplification == 4

    def test_the_batch_is_divided_within_a_slice_only(self):
        target = ShardingTree.of(hybrid_mesh((4, 2), (1, 2)), P("a"))
        assert target.way_to_read("once", 8) == "once"  # 16 devices, 8 in a slice
        with pytest.raises(ShardingError, match="4 rows do not split into 8 shards"):
            target.way_to_read("once", 4)


def compiled_moves(mesh, spec, batch, microbatches=None):
    """The compiled programs that move a batch which was read once, as text."""
    target = ShardingTree.of(mesh, spec, microbatches=microbatches)
    at = target.spread().match(batch)
    programs = []
    for step in target.moves():
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
            for x, s in zip(jax.tree.leaves(batch), at, strict=True)
        ]
        at = step.match(batch)
        programs.append(move_to(at).lower(*shapes).compile().as_text())
    assert at == target.match(batch)
    return programs


COLLECTIVE = re.compile(
    r"= .* (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|send|recv)"
    r"(-start)?\("
)


def collectives(program):
    return [match[1] for match in COLLECTIVE.finditer(program)]


def assert_in_slice(programs, devices_of_a_slice):
    for program in programs:
        assert "megascale" not in program.lower()
        assert not {"send", "recv"} & set(collectives(program))
        # A program is compiled for a slice at a time; its groups are of devices of that.
        assert f"num_partitions={devices_of_a_slice}," in program or devices_of_a_slice == 1
        for groups in re.findall(r"replica_groups=\{\{([\d,{}]*)\}\}", program):
            assert max(map(int, re.findall(r"\d+", groups))) < devices_of_a_slice
    for program in programs[1:]:
        assert collectives(program) == []  # what is not needed is dropped where it is


JOBS = {
    "data over slices": ("v5e:4x4", 2, {"data": 8, "model": 4}, P("data")),
    "replicas over slices": ("v5e:4x4", 2, {"replica": 2, "data": 4, "model": 4}, P("data")),
    "a large job": ("v5e:16x16", 4, {"data": 64, "model": 16}, P("data")),
    "a large job, replicas over slices": (
        "v5e:16x16",
        4,
        {"replica": 8, "data": 16, "model": 8},
        P("data"),
    ),
    "model over slices": ("v5p:2x2x2", 4, {"model": 8, "data": 4}, P("data")),
    "v4, a host is a slice": ("v4:2x2x1", 4, {"data": 4, "model": 4}, P("data")),
    "tokens cut within a slice": ("v5p:2x2x1", 2, {"data": 2, "seq": 4}, P("data", "seq")),
    "tokens cut over slices": ("v5p:2x2x1", 2, {"seq": 4, "data": 2}, P("data", "seq")),
    "leaves cut in different ways": (
        "v5p:2x2x1",
        2,
        {"data": 4, "seq": 2},
        {"tokens": P("data", "seq"), "id": P("seq")},
    ),
}


@needs_libtpu
class TestCompiled:
    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("name", JOBS)
    def test_no_collective_spans_slices(self, name, axis_type):
        topology, slices, axes, spec = JOBS[name]
        mesh = topology_mesh(topology, axes, slices=slices)
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * len(axes))
        rows = 2 * mesh.size
        batch = {
            "id": np.broadcast_to(np.int32(0), (rows,)),
            "tokens": np.broadcast_to(np.int32(0), (rows, 512)),
        }
        programs = compiled_moves(mesh, spec, batch)
        assert_in_slice(programs, mesh.size // slices)
        assert collectives(programs[0])  # something is exchanged

    @pytest.mark.parametrize("name", ["model over slices", "tokens cut over slices"])
    def test_nor_with_microbatches(self, name):
        topology, slices, axes, spec = JOBS[name]
        mesh = topology_mesh(topology, axes, slices=slices)
        batch = {"tokens": np.broadcast_to(np.int32(0), (4, 2 * mesh.size, 512))}
        assert_in_slice(compiled_moves(mesh, spec, batch, microbatches=4), mesh.size // slices)

    @pytest.mark.parametrize(
        ("slices", "axes", "spec", "programs"),
        [
            (1, {"seq": 2, "data": 2}, P("data", "seq"), 1),
            (2, {"data": 4, "model": 2}, P("data"), 1),
            (2, {"replica": 2, "model": 2, "data": 2}, P("data"), 1),
            (2, {"data": 4, "model": 2}, {"x": P("data"), "y": P("data", None)}, 1),
            (2, {"seq": 4, "data": 2}, {"x": P("data"), "y": P("data", "seq")}, 2),
            (2, {"data": 4, "model": 2}, {"x": P("data"), "y": P()}, 2),
        ],
    )
    def test_a_second_program_only_where_something_is_dropped(self, slices, axes, spec, programs):
        target = ShardingTree.of(topology_mesh("v5p:2x2x1", axes, slices=slices), spec)
        assert len(target.moves()) == programs
        assert target.moves()[-1] is target

    def test_left_to_itself_the_compiler_crosses(self):
        """So what the test above looks for is what a crossing looks like."""
        mesh = topology_mesh("v5p:2x2x1", {"data": 4, "model": 2}, slices=2)
        target = ShardingTree.of(mesh, {"x": P("data"), "y": P()})
        batch = {"x": np.broadcast_to(np.int32(0), (16, 512))}
        batch["y"] = batch["x"]
        read, end = target.spread().match(batch), target.match(batch)
        shapes = [jax.ShapeDtypeStruct((16, 512), np.int32, sharding=s) for s in read]
        program = move_to(end).lower(*shapes).compile().as_text()
        assert "megascale" in program
        assert {"send", "recv"} <= set(collectives(program))

    @pytest.mark.slow
    @settings(deadline=None, max_examples=25)
    @given(
        topology=st.sampled_from([("v5p:2x2x1", 2), ("v5p:2x2x2", 4), ("v5e:4x4", 2)]),
        data=st.data(),
    )
    def test_any_mesh_and_any_specs(self, topology, data):
        name, slices = topology
        devices = topology_mesh(name, {"all": TPUS[name] * slices}, slices=slices).devices.flatten()

        def factors(count):
            shape = [1, 1, 1]
            for _ in range(count.bit_length() - 1):  # all of them are powers of two
                shape[data.draw(st.integers(0, 2))] *= 2
            return shape

        arranged = create_hybrid_device_mesh(
            factors(TPUS[name]), factors(slices), devices, allow_split_physical_axes=True
        )
        mesh = Mesh(arranged, ("a", "b", "c"))
        of_leaves = data.draw(st.lists(specs(), min_size=1, max_size=3))
        batch = {
            i: np.broadcast_to(np.int32(0), (2 * mesh.size, *[64] * max(0, len(spec) - 1)))
            for i, spec in enumerate(of_leaves)
        }
        programs = compiled_moves(mesh, dict(enumerate(of_leaves)), batch)
        assert_in_slice(programs, TPUS[name])


TPUS = {"v5p:2x2x1": 4, "v5p:2x2x2": 8, "v5e:4x4": 16}
