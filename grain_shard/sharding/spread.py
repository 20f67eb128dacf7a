"""`Spread`: the shardings by which every row is read once, and the way from there to the step's.

Rows are exchanged within a slice only: between slices there is just the data-centre network, which
the step needs for itself. A row that several slices need is therefore read once in each of them.
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
    """Which axes cut the rows where they are read.

    A host reads the same rows of all leaves. So the rows may only be divided between slices where
    that is so for every leaf; within a slice they are divided by whatever axes there are.

    Attributes:
        cut: The mesh, cut at the slices.
        axes: Those that cut the rows, in this order; the last ones lead to no other slice.
    """

    cut: CutMesh
    axes: tuple[str, ...]

    @classmethod
    def of(cls, shardings: Sequence[NamedSharding]) -> Spread:
        """For leaves that end up in these shardings, all of one mesh."""
        cut = CutMesh.of(cast(Mesh, shardings[0].mesh))
        of_leaves = [cut.axes(batch_axes(sharding.spec)) for sharding in shardings]
        common = _common_start(of_leaves)
        # As the leaf with the most shards has them, so that it needs the simplest exchange.
        most = max(shardings, key=num_shards)
        others = (*cut.axes(batch_axes(most.spec)), *cut.mesh.axis_names)
        within = [axis for axis in others if axis in cut.in_slice]
        return cls(cut, tuple(dict.fromkeys((*common, *within))))

    def read_by(self, sharding: Sharding) -> Sharding:
        """The sharding of a leaf as it is read: no two devices of a slice hold the same row."""
        return self._by_rows(sharding, self.axes)

    def gathered(self, sharding: Sharding) -> Sharding:
        """How a leaf lies after the first step on the way from there to its own sharding.

        Each device gathers from its neighbours in the slice all the rows that it needs. If it is to
        have only a part of each row, it then drops the others, in a second step. Neither can leave
        the slice; in one step XLA finds ways across. On one slice it may choose, and there is one.
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
        spec = PartitionSpec(tuple(axes))
        return NamedSharding(self.cut.mesh, spec, memory_kind=sharding.memory_kind)


def _common_start(sequences: Sequence[Sequence[str]]) -> list[str]:
    """The words with which all of them begin."""
    alike = takewhile(lambda words: len(set(words)) == 1, zip(*sequences, strict=False))
    return [words[0] for words in alike]
