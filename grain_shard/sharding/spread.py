"""`Spread`: the shardings in which a batch is read if every row is read once.

After the read, the devices move the batch to the shardings of the training step. They exchange rows
within a slice only. Between slices there is just the data-centre network, which the training step
needs for itself. So a row that several slices need is read once in each of these slices.
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
        cut: The mesh, with its axes cut where a slice ends.
        axes: The axes that cut the rows, outermost first: the axes with which the specs of all
            leaves begin, and then all other axes that stay within a slice.
    """

    cut: CutMesh
    axes: tuple[str, ...]

    @classmethod
    def of(cls, shardings: Sequence[NamedSharding]) -> Spread:
        """Returns the spread for leaves that the training step needs in these shardings.

        Args:
            shardings: At least one sharding; all are on the same mesh.
        """
        cut = CutMesh.of(cast(Mesh, shardings[0].mesh))
        of_leaves = [cut.axes(batch_axes(sharding.spec)) for sharding in shardings]
        common = _common_start(of_leaves)
        # The most sharded leaf gives the order of the axes, so that its rows move least.
        most = max(shardings, key=num_shards)
        others = (*cut.axes(batch_axes(most.spec)), *cut.mesh.axis_names)
        within = [axis for axis in others if axis in cut.in_slice]
        return cls(cut, tuple(dict.fromkeys((*common, *within))))

    def read_by(self, sharding: Sharding) -> Sharding:
        """Returns the sharding in which a leaf is read: each row is on one device of a slice.

        Args:
            sharding: The sharding in which the training step needs the leaf.
        """
        return self._by_rows(sharding, self.axes)

    def gathered(self, sharding: Sharding) -> Sharding:
        """Returns the sharding of a leaf after the first of its moves.

        On one slice there is a single move, and XLA chooses its way. On several slices there may be
        two moves. In the first move each device gathers whole rows from the devices of its slice.
        In the second move it keeps only the part of each row that it needs. Neither move can leave
        the slice. In a single move XLA would also send data between slices.

        Args:
            sharding: The sharding in which the training step needs the leaf.
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
    """Returns the longest common prefix of the sequences."""
    alike = takewhile(lambda words: len(set(words)) == 1, zip(*sequences, strict=False))
    return [words[0] for words in alike]
