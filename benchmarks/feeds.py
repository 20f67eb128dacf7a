"""Measures the cost of feeds on one host, and the work of each host on several.

    python benchmarks/feeds.py [--feeds 16] [--batch 32] [--length 512] [--steps 200]

The pipeline filters, mixes and packs real text: Python's documentation and the licenses of
installed packages, as bytes. First, on one host, the pipeline as feeds and the same pipeline as one
stream run in turns. Then, on 1, 2 and 4 hosts, the script counts the documents that each host
packs, and the processor time of its feeds. It also prints the size of the state and the time to
save it.
"""

import argparse
import importlib.metadata
import json
import pydoc_data.topics
import statistics
import tempfile
import time

import grain
import numpy as np

from grain_shard import rehearse

_PIECE = 400  # most bytes of a piece of text
_WARM_UP = 8  # number of batches before the measured ones


def documents():
    """Returns two lists of pieces of text, as bytes: Python's documentation, and licenses."""
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


def packed(feed, sources, length, counted):
    """Returns the endless stream of packed rows of a feed. Feed 0 of 1 is the whole stream.

    Args:
        feed: Index of the feed, and the number of feeds.
        sources: The lists of pieces that `documents` returns.
        length: Number of tokens of a row.
        counted: A list to which the length of each document is appended when it is read.
    """

    def tokenize(text):
        counted.append(len(text))
        return {"tokens": np.frombuffer(text, np.uint8).astype(np.int32)}

    streams = [
        grain.MapDataset.source(pieces)
        .seed(1)
        .shuffle()
        .repeat()[feed.shard_index :: feed.shard_count]
        .map(tokenize)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .filter(lambda document: len(document["tokens"]) >= 32)
        for pieces in sources
    ]
    return grain.experimental.FirstFitPackIterDataset(
        grain.IterDataset.mix(streams, weights=[4, 1]),
        length_struct={"tokens": length},
        num_packing_bins=8,
    )


class Timed(grain.IterDataset):
    """The rows of a dataset. For each row, the processor time of its thread goes into a list."""

    def __init__(self, parent, seconds):
        super().__init__(parent)
        self.seconds = seconds

    def __iter__(self):
        (parent,) = self.parents
        return TimedIterator(iter(parent), self.seconds)


class TimedIterator(grain.DatasetIterator):
    def __init__(self, parent, seconds):
        super().__init__(parent)
        self.rows, self.seconds = parent, seconds

    def __next__(self):
        start = time.thread_time()
        row = next(self.rows)
        self.seconds.append(time.thread_time() - start)
        return row

    def get_state(self):
        return self.rows.get_state()

    def set_state(self, state):
        self.rows.set_state(state)


def pipeline(kind, args, counted, wrapped=lambda feed: feed):
    import jax

    import grain_shard

    mesh, sources = jax.make_mesh((jax.device_count(),), ("data",)), documents()
    if kind == "one stream":
        stream = packed(grain.sharding.ShardOptions(0, 1), sources, args.length, counted)
        return stream.batch(args.batch).shard_to(mesh, rows="global")
    feeds = grain_shard.feeds(
        lambda feed: wrapped(packed(feed, sources, args.length, counted)), num_feeds=args.feeds
    )
    return feeds.batch(args.batch).shard_to(mesh)


def rates(kinds, args):
    """Measures both pipelines in turns, and returns their rates by name.

    Each rate is a pair: tokens per second by the clock, and tokens per second of processor time.
    Padding is not counted.
    """
    found = {kind: [] for kind in kinds}
    pipelines = {kind: pipeline(kind, args, []) for kind in kinds}
    for _ in range(args.repeats):
        for kind, ds in pipelines.items():
            with iter(ds) as batches:
                for _ in range(_WARM_UP):
                    next(batches)
                clocks = np.array([time.perf_counter(), time.process_time()])
                tokens = 0
                for _ in range(args.steps):
                    segments = np.asarray(next(batches)["tokens_segment_ids"])
                    tokens += int(np.count_nonzero(segments))
                clocks = np.array([time.perf_counter(), time.process_time()]) - clocks
                found[kind].append(tokens / clocks)
    return found


def work(args):
    """Runs the feeds of this host for some steps, and returns the figures by name.

    "feeds" is the number of its feeds, and "documents" the number of documents that it packed.
    "seconds" is the processor time of the feeds. "state" and "entry" are the bytes of the state and
    of its largest entry. "save" is the median of the seconds to save the state.
    """
    from grain_shard.hosts.state_files import write_state

    counted, seconds, saves = [], [], []
    with iter(pipeline("feeds", args, counted, lambda ds: Timed(ds, seconds))) as batches:
        for _ in range(args.steps):
            next(batches)
        state = batches.get_state()
        with tempfile.TemporaryDirectory() as directory:
            for _ in range(20):
                start = time.perf_counter()
                write_state(directory, batches.get_state())
                saves.append(time.perf_counter() - start)
    return {
        "feeds": len(state["feeds"]),
        "documents": len(counted),
        "seconds": sum(seconds),
        "state": len(json.dumps(state)),
        "entry": max(len(json.dumps(entry)) for entry in state["feeds"].values()),
        "save": statistics.median(saves),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--feeds", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()

    print(f"one host, batches of {args.batch} rows of {args.length} tokens, {args.feeds} feeds")
    kinds = ("one stream", "feeds")
    (of_host,) = rehearse.run(rates, kinds, args, hosts=1)
    for clock, name in enumerate(("second", "second of processor")):
        one_stream, feeds = (np.array(of_host[kind])[:, clock] for kind in kinds)
        print(
            f"  tokens per {name}: one stream {np.median(one_stream):,.0f},"
            f" feeds {np.median(feeds):,.0f}; median ratio of {args.repeats} pairs:"
            f" {np.median(feeds / one_stream):.3f}"
        )

    print(f"each host in {args.steps} steps, the largest of its kind")
    for hosts in (1, 2, 4):
        of_hosts = rehearse.run(work, args, hosts=hosts)
        most = {name: max(of_host[name] for of_host in of_hosts) for name in of_hosts[0]}
        print(
            f"  {hosts} hosts: {most['feeds']:2} feeds, {most['documents']:6} documents in"
            f" {most['seconds']:5.2f} s of processor;"
            f" state {most['state']} bytes ({most['entry']} a feed),"
            f" saved in {most['save'] * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
