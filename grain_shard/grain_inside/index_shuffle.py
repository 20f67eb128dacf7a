"""Computes Grain's global shuffle for many indices at once.

``MapDataset.shuffle`` permutes indices by a cipher, so that no permutation has to be stored. The
cipher is a Feistel network of 4 rounds with the round function of Simon
(https://eprint.iacr.org/2013/404). Its keys come from C++'s ``std::seed_seq``. The cipher is
repeated until the result is an index ("cycle walking"). Grain takes 5 us for one index. NumPy takes
a fraction of that per index of an array. `routes` compares some results with Grain's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

_ROUNDS = 4
# The cipher permutes 2**b numbers, where b is even and at least 16.
_MIN_BLOCK_BITS = 16
# Up to this many indices, the order of all of them is computed once and kept. Computed batch by
# batch, it would take up to 0.8 us a record, a tenth of the time that reading an array takes.
_MOST_IN_MEMORY = 2**21
# Below this many indices, the cipher must be repeated often to reach one: 13,000 times for 5.
_FEW = 1024


def shuffled(indices: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Returns the shuffled index of each index, as Grain's shuffle gives it.

    Args:
        indices: int64[n], each in ``range(length)``.
        length: Number of indices that are permuted.
        seed: Seed of the permutation, 32 bits.

    Returns:
        int64[n], each in ``range(length)``.

    Example:
        >>> sorted(shuffled(np.arange(5), 5, seed=1).tolist())
        [0, 1, 2, 3, 4]
    """
    if length > 2**_MIN_BLOCK_BITS:
        return _walked(indices, length, seed, math.ceil(math.log2(length - 1)))
    return _permutation(length, seed)[indices].astype(np.int64)


def loses_a_record(length: int) -> bool:
    """Returns whether Grain's shuffle of `length` records repeats one record and lacks another.

    It does for 2**16 + 1, 2**18 + 1, 2**20 + 1, ... records, where its cipher permutes one number
    too few.
    """
    bits = (length - 1).bit_length() - 1
    return bits >= _MIN_BLOCK_BITS and bits % 2 == 0 and length - 1 == 2**bits


def permuted(indices: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Returns the shuffled index of each index: Grain's, unless Grain's shuffle loses a record.

    Args:
        indices: int64[n], each in ``range(length)``.
        length: Number of indices that are permuted.
        seed: Seed of the permutation, 32 bits.

    Returns:
        int64[n], each in ``range(length)``.
    """
    if length <= _MOST_IN_MEMORY:
        return _order(length, seed)[indices].astype(np.int64)
    return _walked(indices, length, seed, (length - 1).bit_length())


def permuted_index(index: int, length: int, seed: int) -> int:
    """Returns the same as `permuted`, for one index in a tenth of the time.

    Example:
        >>> permuted_index(3, 2**22, seed=1) == permuted(np.array([3]), 2**22, seed=1).item()
        True
    """
    if length <= _MOST_IN_MEMORY:
        return int(_order(length, seed)[index])
    word_bits, keys = -(-(length - 1).bit_length() // 2), _round_keys(seed)
    while (index := _encrypted(index, word_bits, keys)) >= length:
        pass
    return index


@functools.lru_cache(maxsize=4)
def _order(length: int, seed: int) -> np.ndarray:
    """Returns `permuted` of every index, as unsigned integers: 8 MB and 1 s at most."""
    if length <= 2**_MIN_BLOCK_BITS:
        return _permutation(length, seed)
    order = _walked(np.arange(length), length, seed, (length - 1).bit_length())
    return order.astype(np.uint32)


def _walked(indices: np.ndarray, length: int, seed: int, bits: int) -> np.ndarray:
    """Encrypts each number until it is below `length` ("cycle walking").

    Args:
        indices: int64[n], the numbers.
        length: Number of indices that are permuted.
        seed: Seed of the permutation.
        bits: Bits of the numbers that the cipher permutes, rounded up to an even number here.
    """
    word_bits, keys = -(-bits // 2), _round_keys(seed)
    result = indices.astype(np.uint32 if length <= 2**32 else np.uint64)
    walking, values = np.arange(len(indices)), result  # the positions that are not indices yet
    while len(walking):
        values = _encrypted(values, word_bits, keys)
        result[walking] = values
        outside = values >= length
        walking, values = walking[outside], values[outside]
    return result.astype(np.int64)


# Each epoch has its own seed and permutation. Feeds of few records are in many epochs at once.
# Without this cache, permutations would take a third of the time of packing text. A permutation
# takes 128 KB at most.
@functools.lru_cache(maxsize=64)
def _permutation(length: int, seed: int) -> np.ndarray:
    """Returns the shuffled index of every index, for at most 2**16 indices.

    `after` is the whole cipher as a table: the encrypted number of each of the 2**16 numbers. So
    repeating the cipher is one look into the table.

    Returns:
        uint16[length], read-only.
    """
    numbers = np.arange(2**_MIN_BLOCK_BITS, dtype=np.uint16)
    after = _encrypted(numbers, _MIN_BLOCK_BITS // 2, _round_keys(seed))
    result = after[:length].copy()
    walking = np.flatnonzero(result >= length)
    while len(walking):
        if length < _FEW:  # then the table takes twice as many repetitions at each turn
            after = np.where(after < length, after, after.take(after))
        result[walking] = after.take(result[walking])
        walking = walking[result[walking] >= length]
    result.flags.writeable = False
    return result


def _encrypted(blocks: Any, word_bits: int, keys: tuple[int, ...]) -> Any:
    """Encrypts an array of unsigned integers, or an int.

    A number is cut into two words. Each round changes one of them by a function of the other word
    and a key.

    Args:
        blocks: The numbers.
        word_bits: Bits of a word, half of the bits of a number.
        keys: The keys of the 4 rounds, of which the lowest `word_bits` bits are used.
    """
    # All constants get the dtype of the array, so that NumPy does not widen the result.
    dtype = int if isinstance(blocks, int) else blocks.dtype.type
    mask, width = dtype((1 << word_bits) - 1), dtype(word_bits)
    # Shifts to the right by which `mixed` rotates a word to the left by 1, 2 and 8 bits.
    by_1, by_2, by_8 = (dtype(word_bits - r) for r in (1, 2, 8))

    def mixed(word: Any) -> Any:
        """Returns Simon's round function of a word: ``(rot(1) & rot(8)) ^ rot(2)``.

        ``rot(n)`` is the word rotated left by n bits. Bits above the word are not cleared.
        """
        twice = word | (word << width)  # shifted right, its lower half is the rotated word
        return ((twice >> by_1) & (twice >> by_8)) ^ (twice >> by_2)

    left, right = (blocks >> width) & mask, blocks & mask
    word_keys = [dtype(key & int(mask)) for key in keys]
    for i in range(0, _ROUNDS, 2):  # two rounds a turn
        left = (left ^ mixed(right) ^ word_keys[i]) & mask
        right = (right ^ mixed(left) ^ word_keys[i + 1]) & mask
    return (left << width) | right


@functools.lru_cache(maxsize=64)  # for some epochs, each of which has a different seed
def _round_keys(seed: int) -> tuple[int, ...]:
    """Returns the keys of the cipher's 4 rounds.

    They are the words that ``std::seed_seq{seed}.generate`` gives (ISO C++, [rand.util.seedseq]).
    """
    n = _ROUNDS
    low = 0xFFFFFFFF  # keeps the lowest 32 bits; "&" binds less tightly than "+", "-" and "*"
    p, q = 1, 2  # as C++ defines them for n = 4
    words = [0x8B8B8B8B] * n

    def scrambled(word: int) -> int:
        return word ^ (word >> 27)

    for k in range(n):
        mixed = words[k] ^ words[(k + p) % n] ^ words[k - 1]
        first = 1664525 * scrambled(mixed) & low
        # C++ adds the number of seeds (1) at k = 0, then k + seed, and later k alone.
        second = first + {0: 1, 1: 1 + seed}.get(k, k) & low
        words[(k + p) % n] = words[(k + p) % n] + first & low
        words[(k + q) % n] = words[(k + q) % n] + second & low
        words[k] = second
    for k in range(n):
        mixed = words[k] + words[(k + p) % n] + words[k - 1] & low
        first = 1566083941 * scrambled(mixed) & low
        second = first - k & low
        words[(k + p) % n] ^= first
        words[(k + q) % n] ^= second
        words[k] = second
    return tuple(words)
