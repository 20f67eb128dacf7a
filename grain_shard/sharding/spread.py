"""`Spread`: the shardings in which every row is read once, and the moves from there to the step's.

Rows are exchanged within a slice only: between slices there is just the data-centre network, which
the step needs for itself. A row that several slices need is therefore read once in each slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from grain_shard.sharding.layout import batch_axes
from grain_shard.sharding.slices import CutMesh
from grain_shard.sharding.specs import num_shards, spec_rank


@dataclass(frozen=True)
class Spread:
    """The mesh axes that cut the rows of a batch when each row is read once.

    A host reads the same rows of all leaves. So the rows are divided between slices only if that
    is possible for every leaf. Within a slice, all axes divide the rows.

    Attributes:
        cut: The mesh, cut at the slices.
        axes: The axes that cut the rows, in this order; the last ones stay within a slice.
    """

    cut: CutMesh
    axes: tuple[str, ...]

    @classmethod
    def of(cls, shardings: Sequence[NamedSharding]) -> Spread:
        """Returns the spread for leaves that end in these shardings, all on one mesh."""
        cut = CutMesh.of(cast(Mesh, shardings[0].mesh))
        of_leaves = [cut.axes(batch_axes(sharding.spec)) for sharding in shardings]
        common = _common_start(of_leaves)
        # The axes stand in the order of the most sharded leaf, so that this leaf moves least.
        most = max(shardings, key=num_shards)
        others = (*cut.axes(batch_axes(most.spec)), *cut.mesh.axis_names)
        within = [axis for axis in others if axis in cut.in_slice]
        return cls(cut, tuple(dict.fromkeys((*common, *within))))

    def read_by(self, sharding: Sharding) -> Sharding:
        """Returns a leaf's sharding when it is read: each row is on one device of a slice."""
        return self._by_rows(sharding, self.axes)

    def gathered(self, sharding: Sharding) -> Sharding:
        """Returns a leaf's sharding after the first step of the exchange.

        In the first step each device gathers, from its neighbours in the slice, all rows that it
        needs. If the device needs only a part of each row, it drops the rest in a second step.
        Neither step can leave the slice; in a single step XLA would find ways across slices. On one
        slice XLA may choose, so there is a single step.
        """
        if self.cut.num_slices == 1 or not isinstance(sharding, NamedSharding):
            return sharding
        own = self.cut.axes(batch_axes(sharding.spec))
        kept = _common_start([self.axes, own])
        only_rows = spec_rank(sharding) <= 1 and len(kept) == len(own)
        return sharding if only_rows else self._by_rows(sharding, kept)

    def _by_rows(self, sharding: Sharding, axes: Sequence[str]) -> Sharding:
        if not isinstance(sharding, NamedSharding):
            return sharding
        return sharding.update(mesh=self.cut.mesh, spec=PartitionSpec(tuple(axes)))


def _common_start(sequences: Sequence[Sequence[str]]) -> list[str]:
    """Returns the longest common prefix."""
    alike = takewhile(lambda words: len(set(words)) == 1, zip(*sequences, strict=False))
    return [words[0] for words in alike]
