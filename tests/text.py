"""Real text to pack: what Python's documentation and the packages' licenses say, cut into pieces.

A piece is a document: its number, and its text as bytes, of which there are at most 96.
"""

import functools
import importlib.metadata
import pydoc_data.topics

import grain
import numpy as np

LENGTH = 128  # tokens in a row
_PIECE = 96


@functools.cache
def documents():
    """Every piece of text there is, by source; a document's number is its place in `all_of`."""
    return {
        "documentation": _pieces(pydoc_data.topics.topics.values())[:700],
        "licenses": _pieces(_licenses())[:350],
    }


def all_of(sources):
    return [text for texts in sources.values() for text in texts]


def _pieces(texts):
    return [
        part[i : i + _PIECE]
        for text in texts
        for part in text.encode().split(b"\n\n")
        for i in range(0, len(part), _PIECE)
    ]


def _licenses():
    """The license texts of the packages that Grain cannot do without."""
    for package in ("absl-py", "array-record", "grain", "jax", "numpy"):
        for file in importlib.metadata.files(package) or ():
            if "LICENSE" in file.name.upper() and file.name.upper().endswith((".TXT", "LICENSE")):
                yield file.read_text()


def stream(name, feed):
    """The documents of one source that belong to a feed, shuffled, the short ones left out."""
    sources = documents()
    first = 0 if name == "documentation" else len(sources["documentation"])
    return (
        grain.MapDataset.source(list(enumerate(sources[name], first)))
        .slice(slice(feed.shard_index, None, feed.shard_count))
        .seed(7)
        .shuffle()
        .map(tokenize)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .filter(lambda document: len(document["tokens"]) >= 8)
    )


def tokenize(document):
    number, text = document
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    return {"tokens": tokens, "document": np.full(len(tokens), number, np.int32)}


def mixed(feed):
    """Two documents of Python's documentation for one of a license, until one source is over."""
    streams = [stream(name, feed) for name in ("documentation", "licenses")]
    return grain.IterDataset.mix(streams, weights=[2, 1])


def packed(feed):
    return grain.experimental.FirstFitPackIterDataset(
        mixed(feed), length_struct={"tokens": LENGTH, "document": LENGTH}, num_packing_bins=6
    )


def tokens_of(rows):
    """From the rows of batches, every token as (document, position, token)."""
    real = rows["tokens_segment_ids"] > 0
    columns = (rows["document"], rows["tokens_positions"], rows["tokens"])
    return list(zip(*(column[real].tolist() for column in columns), strict=True))
