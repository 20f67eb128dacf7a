"""The ends of streams and of exchanges, as far as one process shows them."""

import queue

import grain
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from grain_shard.hosts.ends import BATCH, AgreedEnd
from grain_shard.sharding.reshard import Resharder


class AllSayBatch:
    """Rounds in which every host, this one too, is taken to have the batch."""

    def __init__(self, batches=1):
        self.posted = queue.SimpleQueue()
        for _ in range(batches):
            self.posted.put(BATCH)

    def verdict(self, round_, decide, **_):
        return BATCH

    def forget(self, round_):
        pass


class Host:
    """A host's batches; ends with an error, if there is one."""

    def __init__(self, *batches, error=StopIteration):
        self.batches, self.error = list(batches), error

    def __next__(self):
        if not self.batches:
            raise self.error
        return self.batches.pop(0)

    def stop(self):
        pass

    close = stop


def test_a_failure_is_raised_and_not_padded_over_whatever_the_other_hosts_were_told():
    batches = AgreedEnd(
        Host(error=ValueError("a bad record")),
        AllSayBatch(),
        pads=True,
        same_rows=False,
        position=None,
        template=lambda: pytest.fail("padding was asked for"),
        waited_s=lambda: 0.0,
    )
    with pytest.raises(ValueError, match="a bad record"):
        next(batches)
    batches.close()


def test_the_last_exchange_is_waited_for_where_the_data_end(monkeypatch):
    waited = []
    wait = Resharder.wait
    monkeypatch.setattr(Resharder, "wait", lambda self: (waited.append(self._last), wait(self)))
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    ds = grain.MapDataset.range(16).map(lambda i: {"x": np.float32(i)}).batch(8)
    iterator = iter(ds.shard_to(mesh, P("data"), read="once"))
    assert next(iterator)["x"].shape == (8,)
    next(iterator)
    assert waited == []
    assert next(iterator, None) is None
    assert len(waited) == 1
    assert isinstance(waited[0], jax.Array)


def test_a_scalar_stays_what_it_is_in_padding():
    """It belongs to the whole batch: on hosts that still have rows, it is that of theirs."""
    rows = {"x": np.ones(4), "valid_mask": np.ones(4, bool), "temperature": np.float32(0.7)}
    batches = AgreedEnd(
        Host((rows, 1)),
        AllSayBatch(2),
        pads=True,
        same_rows=False,
        position=0,
        past_end=lambda position: position + 1,
        template=lambda: pytest.fail("there was a batch"),
        waited_s=lambda: 0.0,
    )
    next(batches)
    padding, position = next(batches)
    assert position == 2
    assert not padding["x"].any()
    assert not padding["valid_mask"].any()
    assert padding["temperature"] == np.float32(0.7)
    batches.close()
