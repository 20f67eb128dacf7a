"""Draws random arguments of `.shard_to`, with batch sizes that fit them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from benchmarks.soak import meshes, model
from grain_shard.sharding.layout import round_up


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Batch sizes, mesh and options: the settings that may change when a run is restored.

    Attributes:
        sizes: The global batch size, by the first step that it holds for.
        drawn: The mesh and the specs.
        options: The options of `.shard_to`, by name.
    """

    sizes: Mapping[int, int]
    drawn: meshes.DrawnMesh
    options: Mapping[str, Any]

    @property
    def made(self) -> model.Made:
        """The options on which the values of a batch depend."""
        return model.Made(
            self.drawn.divisor,
            self.options.get("mask_key", "valid_mask"),
            self.options.get("pad_value", 0),
        )

    @property
    def divides(self) -> bool:
        """True if full batches need no padding."""
        return all(size % self.made.multiple == 0 for size in self.sizes.values())

    @property
    def leaves_no_shard_empty(self) -> bool:
        """True if each shard has at least one real row, as feeds on several hosts require."""
        multiple = self.made.multiple
        padded = [(size, round_up(size, multiple)) for size in self.sizes.values()]
        return all(whole - size < whole // multiple for size, whole in padded)

    def apply(self, ds: Any, **options: Any) -> Any:
        """Returns the dataset after `.shard_to`, on the devices of this process."""
        mesh = meshes.here(self.drawn)
        return ds.shard_to(mesh, self.drawn.spec, **{**self.options, **options})


def draw(rng: random.Random) -> Sharding:
    drawn, options = meshes.draw(rng), draw_options(rng)
    steps = [0, *sorted(rng.sample(range(1, 9), rng.choice([0, 0, 0, 1, 2])))]
    sizes = {
        step: rng.choice([rng.randint(1, 20), rng.randint(1, 64), drawn.divisor, 2 * drawn.divisor])
        for step in steps
    }
    return Sharding(sizes, drawn, options)


def draw_options(rng: random.Random) -> dict[str, Any]:
    choices = {
        "mask_key": [None, "mask"],
        "pad_value": [7, {"tokens": -1}],
        "cpu_buffer_size": [1, 2, 7],
        "device_buffer_size": [1, 3],
        "num_threads": [1, 2, 5],
    }
    return {name: rng.choice(of) for name, of in choices.items() if rng.random() < 0.25}
