"""Real text for tests of packing: Python's documentation and licenses of packages, in pieces.

A piece of at most 96 bytes is called a document here. Documents are numbered.
"""

import functools
import importlib.metadata
import pydoc_data.topics

import grain
import numpy as np

LENGTH = 128  # number of tokens of a row
_PIECE = 96  # most bytes of a document


@functools.cache
def documents():
    """Returns the documents as bytes, in a list for each source.

    The number of a document is its index in the list that `all_of` makes of the result.
    """
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
    """Yields the texts of the licenses of packages that Grain needs, and of Grain."""
    for package in ("absl-py", "array-record", "grain", "jax", "numpy"):
        for file in importlib.metadata.files(package) or ():
            if "LICENSE" in file.name.upper() and file.name.upper().endswith((".TXT", "LICENSE")):
                yield file.read_text()


def stream(name, feed):
    """Returns the stream of one source's documents for a feed, shuffled and without short ones."""
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
    """Returns a stream with two documents of Python's documentation for each one of a license.

    It ends when one of the sources ends.
    """
    streams = [stream(name, feed) for name in ("documentation", "licenses")]
    return grain.IterDataset.mix(streams, weights=[2, 1])


def packed(feed):
    return grain.experimental.FirstFitPackIterDataset(
        mixed(feed), length_struct={"tokens": LENGTH, "document": LENGTH}, num_packing_bins=6
    )
