"""Which k elements libstdc++'s ``nth_element`` and ``partial_sort`` bring to the front, equal keys included.

Both leave the k smallest keys in front, but which of several equal keys depends on every swap they make; so
their swaps are made here (``bits/stl_algo.h`` and ``bits/stl_heap.h``, GCC 4 to 15). Keys are integers,
smaller first; an element is its position, ``a`` the array of positions in its present order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


def best_of_introselect(keys: I64, k: int) -> I64:
    """Positions of the first k elements after ``nth_element(begin, begin + k - 1, end)``."""
    a = np.arange(len(keys))
    first, nth, last = 0, k - 1, len(keys)
    depth = 2 * (len(keys).bit_length() - 1)
    while last - first > 3:
        if depth == 0:
            _heap_select(a, keys, first, nth + 1, last)
            return a[:k]
        depth -= 1
        _median_to_first(a, keys, first, first + 1, first + (last - first) // 2, last - 1)
        cut = _partition(a, keys, first + 1, last, int(keys[a[first]]))
        if cut <= nth:
            first = cut
        else:
            last = cut
    a[first:last] = a[first:last][np.argsort(keys[a[first:last]], kind="stable")]  # the insertion sort is stable
    return a[:k]


def best_of_partial_sort(keys: I64, k: int) -> I64:
    """Positions of the first k elements after ``partial_sort(begin, begin + k, end)``."""
    a = np.arange(len(keys))
    _heap_select(a, keys, 0, k, len(keys))
    return a[:k]


def _median_to_first(a: I64, keys: I64, result: int, x: int, y: int, z: int) -> None:
    """Swap the median of elements x, y, z with element `result`."""
    kx, ky, kz = keys[a[x]], keys[a[y]], keys[a[z]]
    low, high, k_low, k_high = (x, y, kx, ky) if kx < ky else (y, x, ky, kx)
    median = high if k_high < kz else z if k_low < kz else low
    a[result], a[median] = a[median], a[result]


def _partition(a: I64, keys: I64, first: int, last: int, pivot: int) -> int:
    """``__unguarded_partition``: move keys below the pivot in front; equal ones are swapped too.

    The left scan stops at keys >= pivot, the right scan at keys <= pivot; the i-th stops are swapped while
    the left one lies left of the right one. What was swapped is not scanned again, but an element swapped to
    the right stops the left scan (it is >= pivot): hence the minimum in the returned cut.
    """
    part = keys[a[first:last]]
    left = first + np.flatnonzero(part >= pivot)
    right = first + np.flatnonzero(part <= pivot)[::-1]
    both = min(len(left), len(right))
    crossed = np.flatnonzero(left[:both] >= right[:both])
    swaps = int(crossed[0]) if len(crossed) else both
    a[left[:swaps]], a[right[:swaps]] = a[right[:swaps]], a[left[:swaps]]
    stops = [int(left[swaps])] if swaps < len(left) else []
    if swaps:
        stops.append(int(right[swaps - 1]))
    return min(stops)


def _heap_select(a: I64, keys: I64, first: int, middle: int, last: int) -> None:
    """Keep the smallest keys of [first, last) in [first, middle), as a heap with the largest on top."""
    heap = a[first:middle].tolist()
    key = keys.tolist()
    for parent in range((len(heap) - 2) // 2, -1, -1):
        _adjust(heap, key, parent, heap[parent])
    for i in range(middle, last):
        element = int(a[i])
        if key[element] < key[heap[0]]:
            a[i] = heap[0]
            _adjust(heap, key, 0, element)
    a[first:middle] = heap


def _adjust(heap: list[int], key: list[int], hole: int, value: int) -> None:
    """``__adjust_heap``: walk the hole down to a leaf along the larger children, `value` up from there."""
    top, size = hole, len(heap)
    child = hole
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if key[heap[child]] < key[heap[child - 1]]:
            child -= 1
        heap[hole] = heap[child]
        hole = child
    if size % 2 == 0 and child == (size - 2) // 2:
        child = 2 * (child + 1)
        heap[hole] = heap[child - 1]
        hole = child - 1
    parent = (hole - 1) // 2
    while hole > top and key[heap[parent]] < key[value]:
        heap[hole] = heap[parent]
        hole = parent
        parent = (hole - 1) // 2
    heap[hole] = value
