"""`RetriedRecords`: the records of a stream, read again after an error that may pass."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import NEVER, route
from grain_shard.reading.faults import Faults
from grain_shard.reading.origin import name_in
from grain_shard.threads.tasks import Raised
from grain_shard.threads.world import World


class RetriedRecords(grain.MapDataset):
    """The records of the parent dataset. A read that fails is tried again, if the rules say so.

    Grain's threads read them, in the `World` of the thread that makes this object.

    Args:
        parent: The dataset of records.
        faults: The rules for failed reads.
    """

    def __init__(self, parent: grain.MapDataset, faults: Faults):
        super().__init__(parent)
        self._records, self._faults, self._world = parent, faults, World()

    def __len__(self) -> int:
        return len(self._records)

    def __str__(self) -> str:
        return "RetriedRecords"

    def __getitem__(self, index: Any) -> Any:  # Grain's stream asks for no slice
        self._world.enter()
        try:
            return self._records[index]
        except Exception as error:
            if isinstance(error, StopIteration):  # which would end the stream without an error
                name = name_in(self._records, "the dataset before .to_iter_dataset", index)
                error.add_note(f"grain_shard: while evaluating {name}")
                Raised.of(error).throw()
            if not self._faults.reads_again(error):
                raise
        # The source is read before the functions are applied, because the rules for an error of the
        # source differ from the rules for an error of a function.
        way = route(self._records, np.array([index]))
        (element,) = way.finish(way.read(NEVER, self._faults), NEVER, self._faults)
        if type(element) is Unreadable:
            Raised.of(element.error).throw()
        return element
