"""Helpers of several kernels."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b):
    """Return the matrix product in fp32; fp32 operands are not rounded to TF32."""
    if INTERPRETED:  # whose tl.dot multiplies the bits of bf16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def logits_of(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """Return the logits [BM, BN] fp32, times log2(e), of queries [BM, BD] and keys [BN, BD]: for exp2."""
    return scaled(product(q, tl.trans(k)), scale, softcap, SOFTCAP)


@triton.jit
def scaled(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Return the logits, times log2(e), of products of queries and keys."""
    s = products * scale
    if SOFTCAP:
        x = s / softcap
        # Triton has no tanh. The exponent is never positive, so nothing overflows.
        small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        bounded = (1.0 - small) / (1.0 + small)  # tanh |x|
        s = softcap * tl.where(x < 0, -bounded, bounded)
    return s * LOG2E


@triton.jit
def finite(m):
    """Return the maxima `m`, 0 where nothing was seen, so that nothing is subtracted from -inf but a number."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def write_one(place):
    """Write 1: a launch on trial."""
    tl.store(place, 1.0)
