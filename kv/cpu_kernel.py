"""The CPU's decode kernel, in Numba's subset of Python. It has no annotations: Numba compiles a function from the types
that it is called with.

XLA calls `float32_handler` or `bfloat16_handler` with a call frame, laid down in `xla/ffi/api/c_api.h` (the public and
versioned C API that `jax.ffi.include_dir()` points to). Read as 64-bit words: frame[1] extensions, frame[2] the API
table, frame[9] the arguments, frame[14] the results; of each buffer, word 3 is the data and word 5 the dimensions.
"""

import math

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic, overload

_METADATA = 1  # XLA_FFI_Extension_Metadata: XLA asks which API version the handler speaks
_WORD = types.int64


@intrinsic
def _pointer(typing_context, address):
    """An integer as a `void *`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(_WORD), generate


@intrinsic
def _as_float(typing_context, bits):
    """The float32 with these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _widen(x):
    """A stored element as float32; see the overload."""
    raise NotImplementedError


@overload(_widen, inline="always")
def _widen_overload(x):
    if x == types.uint16:  # bfloat16 is the upper half of a float32
        return lambda x: _as_float(np.uint32(x) << np.uint32(16))
    return lambda x: x


@njit(fastmath=True, nogil=True, error_model="numpy", cache=True)
def _scores(q_RH, k_GH, count, out_RG):
    """out[r, t] = q[r] . k[t]. Sums stay in registers; two queries at a time share what is read of the keys."""
    R, H = q_RH.shape
    for t in range(count):
        for r in range(0, R - 1, 2):
            a = b = np.float32(0)
            for d in range(H):
                key = _widen(k_GH[t, d])
                a += q_RH[r, d] * key
                b += q_RH[r + 1, d] * key
            out_RG[r, t], out_RG[r + 1, t] = a, b
        if R % 2:
            a = np.float32(0)
            for d in range(H):
                a += q_RH[R - 1, d] * _widen(k_GH[t, d])
            out_RG[R - 1, t] = a


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
    return (p * r * r + r + np.float32(1)) * _as_float(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(fastmath=True, nogil=True, error_model="numpy", cache=True)
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


@njit(fastmath=True, nogil=True, error_model="numpy", cache=True)
def _mix(weights_G, v_GH, count, out_H):
    """out += weights[:count] . v[:count]."""
    H = v_GH.shape[1]
    whole = count - count % 4
    for t in range(0, whole, 4):
        a, b, c, e = weights_G[t], weights_G[t + 1], weights_G[t + 2], weights_G[t + 3]
        for d in range(H):
            out_H[d] += (
                a * _widen(v_GH[t, d])
                + b * _widen(v_GH[t + 1, d])
                + c * _widen(v_GH[t + 2, d])
                + e * _widen(v_GH[t + 3, d])
            )
    for t in range(whole, count):
        for d in range(H):
            out_H[d] += weights_G[t] * _widen(v_GH[t, d])


@njit(fastmath=True, nogil=True, error_model="numpy", cache=True)
def _attend(q_SNH, k_PKGH, v_PKGH, pages_SJ, positions_S, out_SNH):
    """All heads of a page before the next page: they lie side by side, which is what memory is fast at."""
    S, N, H = q_SNH.shape
    K, G = v_PKGH.shape[1:3]
    R = N // K
    scale = np.float32(1 / math.sqrt(H))
    q_NH = np.empty((N, H), np.float32)
    scores_NU = np.empty((N, pages_SJ.shape[1] * G), np.float32)
    out_SNH[:] = 0
    for s in range(S):
        length = positions_S[s] + 1
        num_pages = (length + G - 1) // G
        q_NH[:] = q_SNH[s] * scale
        for j in range(num_pages):
            for h in range(K):
                scores_RG = scores_NU[h * R : (h + 1) * R, j * G : (j + 1) * G]
                _scores(q_NH[h * R : (h + 1) * R], k_PKGH[pages_SJ[s, j], h], min(G, length - j * G), scores_RG)
        for n in range(N if length > 0 else 0):
            _softmax(scores_NU[n, :length])
        for j in range(num_pages):
            count = min(G, length - j * G)
            for h in range(K):
                v_GH = v_PKGH[pages_SJ[s, j], h]
                for n in range(h * R, (h + 1) * R):
                    _mix(scores_NU[n, j * G : j * G + count], v_GH, count, out_SNH[s, n])


@njit(cache=True)
def _words(address, count):
    return carray(_pointer(address), (count,), np.int64)


@njit(cache=True)
def _buffer(buffers, index):
    """Data address and dimensions of one argument or result."""
    buffer = _words(_words(buffers, index + 1)[index], 6)
    return _pointer(buffer[3]), _words(buffer[5], buffer[4])


@njit(cache=True)
def _answer_metadata(frame):
    """Whether this call only asks for the API version; then it has been answered with the caller's own."""
    if frame[1] == 0:
        return False
    extension = _words(frame[1], 4)
    if extension[1] & 0xFFFFFFFF != _METADATA:
        return False
    _words(extension[3], 4)[3] = _words(frame[2], 5)[4]
    return True


@njit(cache=True)
def _run(frame, element):
    """Arguments: q_SNH, k_LPKGH, v_LPKGH, pages_SJ, positions_S, layer_1. Result: out_SNH."""
    q, n = _buffer(frame[9], 0)
    k, kd = _buffer(frame[9], 1)
    v, vd = _buffer(frame[9], 2)
    pages, pd = _buffer(frame[9], 3)
    positions, _ = _buffer(frame[9], 4)
    layer = carray(_buffer(frame[9], 5)[0], (1,), np.int32)[0]
    out, _ = _buffer(frame[14], 0)
    _attend(
        carray(q, (n[0], n[1], n[2]), np.float32),
        carray(k, (kd[0], kd[1], kd[2], kd[3], kd[4]), element)[layer],
        carray(v, (vd[0], vd[1], vd[2], vd[3], vd[4]), element)[layer],
        carray(pages, (pd[0], pd[1]), np.int32),
        carray(positions, (n[0],), np.int32),
        carray(out, (n[0], n[1], n[2]), np.float32),
    )


@cfunc(_WORD(types.CPointer(_WORD)), cache=True)
def float32_handler(frame):
    words = carray(frame, (15,), np.int64)
    if not _answer_metadata(words):
        _run(words, np.float32)
    return 0  # no error


@cfunc(_WORD(types.CPointer(_WORD)), cache=True)
def bfloat16_handler(frame):
    words = carray(frame, (15,), np.int64)
    if not _answer_metadata(words):
        _run(words, np.uint16)
    return 0
