// The matrix product m16n8k16 (PTX ISA 9.7.14.5.8) for f16 and bf16 operands, f32 and f16 accumulators.
//
// Accumulator of one lane (g = lane / 4, t = lane % 4):      A operand of one lane:
//     row g,   columns 2t, 2t+1  -> c0 c1                        a0: row g,   k 2t..    a2: row g,   k 8+2t..
//     row g+8, columns 2t, 2t+1  -> c2 c3                        a1: row g+8, k 2t..    a3: row g+8, k 8+2t..
// so two neighbouring accumulator tiles, packed to 16 bits, are the A operand of the next product.
#pragma once
#include "ptx.cuh"

template <typename Element>
struct Convert;

template <>
struct Convert<__half> {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        __half2 h = __floats2half2_rn(low, high);
        return *reinterpret_cast<u32*>(&h);
    }
    static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
    static __device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
};

template <>
struct Convert<__nv_bfloat16> {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<u32*>(&h);
    }
    static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
};

// The two elements that Convert<Element>::pack packed.
template <typename Element>
__device__ __forceinline__ float2 unpack(u32 packed) {
    const Element* const x = reinterpret_cast<const Element*>(&packed);
    return make_float2(Convert<Element>::to_float(x[0]), Convert<Element>::to_float(x[1]));
}
// The same of f16, by one conversion of both.
__device__ __forceinline__ float2 unpack_half2(u32 packed) {
    return __half22float2(*reinterpret_cast<__half2*>(&packed));
}

// One accumulator tile of 16×8. `Precision` is float, or __half for the f16 accumulator (f16 operands only).
template <typename Precision>
struct Accumulator;

template <>
struct Accumulator<float> {
    float c[4];
    __device__ __forceinline__ void zero() { c[0] = c[1] = c[2] = c[3] = 0.f; }
    __device__ __forceinline__ float get(int i) const { return c[i]; }
    // Scale rows g and g + 8.
    __device__ __forceinline__ void scale(float top, float bottom) {
        c[0] *= top, c[1] *= top, c[2] *= bottom, c[3] *= bottom;
    }
    // Scale as above and add a tile.
    template <typename Other>
    __device__ __forceinline__ void scale_add(float top, float bottom, const Accumulator<Other>& x) {
        c[0] = fmaf(c[0], top, x.get(0)), c[1] = fmaf(c[1], top, x.get(1));
        c[2] = fmaf(c[2], bottom, x.get(2)), c[3] = fmaf(c[3], bottom, x.get(3));
    }
};

template <>
struct Accumulator<__half> {
    u32 c[2];
    __device__ __forceinline__ void zero() { c[0] = c[1] = 0u; }
    __device__ __forceinline__ float get(int i) const {
        const float2 pair = unpack_half2(c[i / 2]);
        return i % 2 ? pair.y : pair.x;
    }
    __device__ __forceinline__ void scale(float top, float bottom) {
        const float2 a = unpack_half2(c[0]), b = unpack_half2(c[1]);
        c[0] = Convert<__half>::pack(a.x * top, a.y * top);
        c[1] = Convert<__half>::pack(b.x * bottom, b.y * bottom);
    }
    template <typename Other>
    __device__ __forceinline__ void scale_add(float top, float bottom, const Accumulator<Other>& x) {
        const float2 a = unpack_half2(c[0]), b = unpack_half2(c[1]);
        c[0] = Convert<__half>::pack(fmaf(a.x, top, x.get(0)), fmaf(a.y, top, x.get(1)));
        c[1] = Convert<__half>::pack(fmaf(b.x, bottom, x.get(2)), fmaf(b.y, bottom, x.get(3)));
    }
};

// d += A·B for one 16×8 tile, K = 16.
template <typename Element>
__device__ __forceinline__ void mma(Accumulator<float>& d, const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (is_same<Element, __half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d.c[0]), "+f"(d.c[1]), "+f"(d.c[2]), "+f"(d.c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d.c[0]), "+f"(d.c[1]), "+f"(d.c[2]), "+f"(d.c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

template <typename Element>
__device__ __forceinline__ void mma(Accumulator<__half>& d, const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(is_same<Element, __half>, "the f16 accumulator takes f16 operands");
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
                 : "+r"(d.c[0]), "+r"(d.c[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
