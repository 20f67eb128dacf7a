"""What feeds cost one host, and what each of several hosts is left with.

    python benchmarks/feeds.py [--feeds 16] [--batch 32] [--length 512] [--steps 100]

Filters, mixes and packs real text: Python's documentation and the licenses of installed packages,
as bytes. First on one host, with feeds and without: the same Grain pipeline as one stream. Then on
1, 2 and 4 hosts: the rows that each host packs, and the processor time that its feeds take. Last,
the state: its size, and the time to save it.
"""

import argparse
import importlib.metadata
import json
import pydoc_data.topics
import statistics
import tempfile
import time
from pathlib import Path

import grain
import numpy as np

from grain_shard import rehearse

_PIECE = 400  # bytes


def documents():
    """Python's documentation and the licenses of packages, in pieces."""
    packages = ("absl-py", "grain", "jax", "numpy", "orbax-checkpoint")
    licenses = [
        file.read_text()
        for package in packages
        for file in importlib.metadata.files(package) or ()
        if "LICENSE" in file.name and file.suffix in ("", ".txt")
    ]
    return [
        [text[i : i + _PIECE].encode() for text in texts for i in range(0, len(text), _PIECE)]
        for texts in (pydoc_data.topics.topics.values(), licenses)
    ]


def packed(feed, sources, length):
    """The rows of a feed, without end; ``feed`` 0 of 1 is the whole stream."""
    streams = [
        grain.MapDataset.source(pieces)
        .seed(1)
        .shuffle()
        .repeat()[feed.shard_index :: feed.shard_count]
        .map(lambda text: {"tokens": np.frombuffer(text, np.uint8).astype(np.int32)})
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .filter(lambda document: len(document["tokens"]) >= 32)
        for pieces in sources
    ]
    return grain.experimental.FirstFitPackIterDataset(
        grain.IterDataset.mix(streams, weights=[4, 1]),
        length_struct={"tokens": length},
        num_packing_bins=8,
    )


def pipeline(kind, args):
    import jax

    import grain_shard

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sources = documents()
    if kind == "feeds":
        feeds = grain_shard.feeds(
            lambda feed: packed(feed, sources, args.length), num_feeds=args.feeds
        )
        return feeds.batch(args.batch).shard_to(mesh)
    stream = packed(grain.sharding.ShardOptions(0, 1), sources, args.length)
    return stream.batch(args.batch).shard_to(mesh, rows="global")


def rate(kind, args):
    """Tokens per second on this host, padding not counted."""
    with iter(pipeline(kind, args)) as batches:
        for _ in range(8):  # what is packed ahead
            next(batches)
        start, tokens = time.perf_counter(), 0
        for _ in range(args.steps):
            tokens += int(np.count_nonzero(np.asarray(next(batches)["tokens_segment_ids"])))
        return tokens / (time.perf_counter() - start)


def work(args):
    """What this host does for the batches: rows packed, processor seconds; and its state."""
    import jax

    from grain_shard.checkpoint import CheckpointSave  # noqa: F401
    from grain_shard.state_files import write_state

    with iter(pipeline("feeds", args)) as batches:
        next(batches)
        start = time.process_time()
        rows = 0
        for _ in range(args.steps):
            shards = next(batches)["tokens"].addressable_shards
            rows += sum(shard.data.shape[0] for shard in shards if shard.replica_id == 0)
        seconds, state = time.process_time() - start, batches.get_state()
    saves = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(20):
            start = time.perf_counter()
            write_state(directory, batches.get_state())
            saves.append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
    feeds = len(state["feeds"])
    entry = len(json.dumps(next(iter(state["feeds"].values()))))
    return jax.process_index(), feeds, rows, seconds, size, entry, statistics.median(saves)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--feeds", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    print(f"one host, batches of {args.batch} rows of {args.length} tokens, {args.feeds} feeds")
    rates = {"one stream": [], "feeds": []}
    for _ in range(args.repeats):
        for kind, of_kind in rates.items():
            of_kind.append(*rehearse.run(rate, kind, args, hosts=1))
    for kind, of_kind in rates.items():
        print(f"  {kind:10} {statistics.median(of_kind):12,.0f} tokens/s")
    print(
        f"  feeds / one stream: {np.divide(*map(statistics.median, reversed(rates.values()))):.2f}"
    )

    print("each host, the slowest shown")
    for hosts in (1, 2, 4):
        of_hosts = rehearse.run(work, args, hosts=hosts)
        _, feeds, rows, _, size, entry, save_s = max(of_hosts)
        seconds = max(host[3] for host in of_hosts)
        print(
            f"  {hosts} hosts: {feeds:3} feeds, {rows:5} rows, {seconds:6.2f} s of processor;"
            f" state {size} bytes ({entry} a feed), saved in {save_s * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
