// 128-bit accesses to arrays of any start and length: single elements up to a 16-byte boundary, then vectors,
// then single elements.
#pragma once
#include "mma.cuh"

template <>
struct Convert<float> {
    static __device__ __forceinline__ float to_float(float x) { return x; }
    static __device__ __forceinline__ float from_float(float x) { return x; }
};

// In asm, because the compiler may split the store of an array that it keeps in registers.
__device__ __forceinline__ void store_global(void* destination, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// SIZE elements that one instruction reads or writes.
template <typename Element, int SIZE>
struct alignas(SIZE * sizeof(Element)) Vector {
    static constexpr int COUNT = SIZE;
    Element at[SIZE];

    __device__ __forceinline__ void load(const Element* source) {
        if constexpr (sizeof(Vector) == 16) *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(source);
        else at[0] = source[0];
    }
    __device__ __forceinline__ void store(Element* destination) const {
        if constexpr (sizeof(Vector) == 16) store_global(destination, *reinterpret_cast<const uint4*>(at));
        else destination[0] = at[0];
    }
    __device__ __forceinline__ float get(int i) const { return Convert<Element>::to_float(at[i]); }
    __device__ __forceinline__ void set(int i, float x) { at[i] = Convert<Element>::from_float(x); }
};

template <typename Element, bool PACKED>
constexpr int VECTOR_SIZE = PACKED ? 16 / int(sizeof(Element)) : 1;

// Parts of an array:       | head: < 1 vector, up to a 16-byte boundary | vectors | tail: < 1 vector |
// Without packing every element is a vector.
template <typename Element, bool PACKED>
struct VectorSpan {
    using Full = Vector<Element, VECTOR_SIZE<Element, PACKED>>;
    using Single = Vector<Element, 1>;
    long long vectors, size;
    int head;

    __device__ __forceinline__ VectorSpan(const Element* data, long long size_)
        : VectorSpan(reinterpret_cast<u64>(data), size_) {}
    __device__ __forceinline__ constexpr VectorSpan(u64 address, long long size_)
        : vectors((size_ - head_of(address, size_)) / Full::COUNT), size(size_), head(head_of(address, size_)) {}
    // Elements before the first 16-byte boundary.
    static __device__ __forceinline__ constexpr int head_of(u64 address, long long size) {
        const int past = PACKED ? address % 16 / sizeof(Element) : 0;
        const long long most = (Full::COUNT - past) % Full::COUNT;
        return static_cast<int>(most < size ? most : size);
    }
    // Where the tail begins.
    __device__ __forceinline__ constexpr long long tail() const { return head + vectors * Full::COUNT; }
    __device__ __forceinline__ long long vector(long long i) const { return head + i * Full::COUNT; }

    // `body(vector, where)` for each element of head and tail. Both are shorter than a vector, and so than a warp.
    template <typename Body>
    __device__ __forceinline__ void for_edges(const Element* data, int thread, const Body& body) const {
        if constexpr (PACKED) {
            Single one;
            const long long end = tail() + thread;
            if (thread < head) one.load(data + thread), body(one, static_cast<long long>(thread));
            if (end < size) one.load(data + end), body(one, end);
        }
    }
    // The same for each vector and each single element, divided among `threads` threads.
    template <typename Body>
    __device__ __forceinline__ void for_all(const Element* data, int thread, int threads, const Body& body) const {
        for_edges(data, thread, body);
        Full full;
#pragma unroll 4
        for (long long i = thread; i < vectors; i += threads) full.load(data + vector(i)), body(full, vector(i));
    }
};
