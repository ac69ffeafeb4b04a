"""The CPU's decode kernel: one query token per sequence is stored and attends to all pages of its sequence, or to those
that reach into its window.

Work is cut into items of one sequence and one KV head, which threads take from a common counter. No annotations: Numba
compiles a function from the types that it is called with.
"""

import math

import numpy as np
from numba import carray, njit

from model.cpu_calls import HEADER_WORDS, NUM_ITEMS, item_done, next_item
from model.cpu_simd import (
    HEADS_AT_ONCE,
    LANES,
    add_weighted,
    as_bits,
    as_float,
    as_pointer,
    narrow,
    num_bytes,
    widen,
)

# Words of a job. Addresses are of C-contiguous arrays, sizes count elements.
QUERIES, NEW_KEYS, NEW_VALUES, KEYS, VALUES, PAGES, POSITIONS, OUT = range(HEADER_WORDS, HEADER_WORDS + 8)
LAYER, ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES_PER_ROW, PAGES_IN_POOL = range(OUT + 1, OUT + 9)
WINDOW, CAP_BITS = PAGES_IN_POOL + 1, PAGES_IN_POOL + 2  # of a float32, 0 for no soft cap
JOB_WORDS = CAP_BITS + 1

_compiled = njit(fastmath={"contract", "reassoc", "nsz"}, nogil=True, error_model="numpy", cache=True)


@njit(inline="always")
def _exp(x):
    """exp of x <= 0 in float32, to about 2 ulp: 2^n times a polynomial (Cephes `expf`), which vectorises."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1)) * as_float(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@_compiled
def _soft_cap(scores_U, cap):
    """cap * tanh(score / cap)."""
    for t in range(scores_U.shape[0]):
        x = scores_U[t] / cap
        e = _exp(np.float32(-2) * abs(x))
        tanh = (np.float32(1) - e) / (np.float32(1) + e)
        scores_U[t] = cap * (tanh if x > 0 else -tanh)


@_compiled
def _softmax(scores_U):
    top = scores_U[0]
    for t in range(scores_U.shape[0]):
        top = max(top, scores_U[t])
    total = np.float32(0)
    for t in range(scores_U.shape[0]):
        weight = _exp(scores_U[t] - top)
        scores_U[t] = weight
        total += weight
    scale = np.float32(1) / total
    for t in range(scores_U.shape[0]):
        scores_U[t] *= scale


@njit(inline="always")
def _is_finite(x):
    return as_bits(x) & np.uint32(0x7F800000) != np.uint32(0x7F800000)


@_compiled
def _mix(weights_RI, at, rows, count, columns, out_RC, out_at, ahead, element):
    """out[:, out_at:][:, :columns] += weights[:, at:][:, :count] . rows[:count, :columns], the rows by address.

    Meanwhile as much from the address `ahead` on is fetched: what is read next lies elsewhere, where no processor looks
    by itself. Line by line, since many at once keep it from computing.
    """
    R, whole = weights_RI.shape[0], columns - columns % LANES
    for r in range(0, R, HEADS_AT_ONCE):
        heads = min(R - r, HEADS_AT_ONCE)
        weights = weights_RI.ctypes.data + 4 * (r * weights_RI.shape[1] + at)
        out = out_RC.ctypes.data + 4 * (r * out_RC.shape[1] + out_at)
        for c in range(0, whole, LANES):
            column = rows + num_bytes(element) * c
            soon = ahead + num_bytes(element) * c * count
            add_weighted(
                heads, out + 4 * c, out_RC.shape[1], weights, weights_RI.shape[1], column, count, columns, soon, element
            )
    if whole < columns:
        row_ic = carray(as_pointer(rows), (count, columns), element)
        for r in range(R):
            for i in range(count):
                for c in range(whole, columns):
                    out_RC[r, out_at + c] += weights_RI[r, at + i] * widen(row_ic[i, c])


@_compiled
def _store(job, s, h, element):
    """Write the new key and value into their page, 0 for what is not finite; whether all was."""
    H, G = job[HEAD_DIM], job[PAGE_SIZE]
    positions_S = carray(as_pointer(job[POSITIONS]), (job[ROWS],), np.int32)
    pages_SJ = carray(as_pointer(job[PAGES]), (job[ROWS], job[PAGES_PER_ROW]), np.int32)
    where, offset = divmod(np.int64(positions_S[s]), G)
    start = _page_head(job, pages_SJ[s, where], h) * H * G * num_bytes(element)
    k_HG = carray(as_pointer(job[KEYS] + start), (H, G), element)
    v_GH = carray(as_pointer(job[VALUES] + start), (G, H), element)
    new = (s * job[KV_HEADS] + h) * H
    k_H = carray(as_pointer(job[NEW_KEYS] + 4 * new), (H,), np.float32)
    v_H = carray(as_pointer(job[NEW_VALUES] + 4 * new), (H,), np.float32)
    is_whole = True
    for d in range(H):
        k, v = k_H[d], v_H[d]
        if not (_is_finite(k) and _is_finite(v)):
            is_whole = False
            k = k if _is_finite(k) else np.float32(0)
            v = v if _is_finite(v) else np.float32(0)
        k_HG[d, offset] = narrow(k, element)
        v_GH[offset, d] = narrow(v, element)
    return is_whole


@njit(inline="always")
def _page_head(job, page, h):
    """Number of a page's KV head among all of the pool."""
    return (job[LAYER] * job[PAGES_IN_POOL] + page) * job[KV_HEADS] + h


@_compiled
def _attend(job, s, h, length, scores_RU, scaled_RH, element):
    """The query heads of one KV head: scores page by page, softmax, then values page by page."""
    H, G, R = job[HEAD_DIM], job[PAGE_SIZE], job[HEADS] // job[KV_HEADS]
    page_bytes = H * G * num_bytes(element)
    num_pages = (length + G - 1) // G
    start = max(length - job[WINDOW], 0)
    start_page = start // G
    cap = as_float(np.uint32(job[CAP_BITS]))
    pages_SJ = carray(as_pointer(job[PAGES]), (job[ROWS], job[PAGES_PER_ROW]), np.int32)
    first = (s * job[HEADS] + h * R) * H
    q_RH = carray(as_pointer(job[QUERIES] + 4 * first), (R, H), np.float32)
    out_RH = carray(as_pointer(job[OUT] + 4 * first), (R, H), np.float32)
    scale = np.float32(1 / math.sqrt(H))
    out_RH[:] = 0
    scores_RU[:, start_page * G : num_pages * G] = 0
    for r in range(R):
        for d in range(H):
            scaled_RH[r, d] = q_RH[r, d] * scale
    keys = job[KEYS] + _page_head(job, pages_SJ[s, start_page], h) * page_bytes
    first_values = job[VALUES] + _page_head(job, pages_SJ[s, start_page], h) * page_bytes
    for j in range(start_page, num_pages):
        ahead = first_values
        if j + 1 < num_pages:
            ahead = job[KEYS] + _page_head(job, pages_SJ[s, j + 1], h) * page_bytes
        _mix(scaled_RH, 0, keys, H, G, scores_RU, j * G, ahead, element)
        keys = ahead
    for r in range(R):
        if cap > 0:
            _soft_cap(scores_RU[r, start:length], cap)
        _softmax(scores_RU[r, start:length])
        scores_RU[r, start_page * G : start] = 0
    values = first_values
    for j in range(start_page, num_pages):
        ahead = values
        if j + 1 < num_pages:
            ahead = job[VALUES] + _page_head(job, pages_SJ[s, j + 1], h) * page_bytes
        _mix(scores_RU, j * G, values, min(G, length - j * G), H, out_RH, 0, ahead, element)
        values = ahead


@_compiled
def work(address, element):
    """Do items of the job at `address` until there are none left."""
    job = carray(as_pointer(address), (JOB_WORDS,), np.int64)
    H, R, K = job[HEAD_DIM], job[HEADS] // job[KV_HEADS], job[KV_HEADS]
    positions_S = carray(as_pointer(job[POSITIONS]), (job[ROWS],), np.int32)
    item = next_item(address)
    if item >= job[NUM_ITEMS]:
        return
    scores_RU = np.empty((R, job[PAGES_PER_ROW] * job[PAGE_SIZE]), np.float32)
    scaled_RH = np.empty((R, H), np.float32)
    while item < job[NUM_ITEMS]:
        s, h = divmod(item, K)
        length = np.int64(positions_S[s]) + 1
        is_whole = True
        if length > 0:
            is_whole = _store(job, s, h, element)
            _attend(job, s, h, length, scores_RU, scaled_RH, element)
        if length <= 0 or not is_whole:
            out = carray(as_pointer(job[OUT] + 4 * (s * job[HEADS] + h * R) * H), (R * H,), np.float32)
            out[:] = np.float32(0) if is_whole else np.float32(np.nan)
        item_done(address)
        item = next_item(address)
