// 128-bit access to arrays whose start and length are anything: a few single elements, 16-byte packs, a few more.
#pragma once
#include "mma.cuh"

template <>
struct Convert<float> {
    static __device__ __forceinline__ float to_float(float x) { return x; }
    static __device__ __forceinline__ float from_float(float x) { return x; }
};

// In asm, as the compiler may split the store of an array that lives in registers.
__device__ __forceinline__ void store_global(void* destination, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// Elements that are read and written at once.
template <typename Element, int SIZE>
struct alignas(SIZE * sizeof(Element)) Pack {
    static constexpr int COUNT = SIZE;
    Element at[SIZE];

    __device__ __forceinline__ void load(const Element* source) {
        if constexpr (sizeof(Pack) == 16) *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(source);
        else at[0] = source[0];
    }
    __device__ __forceinline__ void store(Element* destination) const {
        if constexpr (sizeof(Pack) == 16) store_global(destination, *reinterpret_cast<const uint4*>(at));
        else destination[0] = at[0];
    }
    __device__ __forceinline__ float get(int i) const { return Convert<Element>::to_float(at[i]); }
    __device__ __forceinline__ void set(int i, float x) { at[i] = Convert<Element>::from_float(x); }
};

template <typename Element, bool PACKED>
constexpr int PACK_SIZE = PACKED ? 16 / int(sizeof(Element)) : 1;

// Parts of an array:       | head: < 1 pack, up to a 16-byte boundary | packs | tail: < 1 pack |
// Without packing every element is a pack. Mirrored by flashlane.lessons.common.cut.
template <typename Element, bool PACKED>
struct Cut {
    using Full = Pack<Element, PACK_SIZE<Element, PACKED>>;
    using Single = Pack<Element, 1>;
    long long packs, size;
    int head;

    __device__ __forceinline__ Cut(const Element* data, long long size_) : size(size_) {
        const int past = PACKED ? reinterpret_cast<u64>(data) % 16 / sizeof(Element) : 0;
        head = static_cast<int>(min(size, static_cast<long long>((Full::COUNT - past) % Full::COUNT)));
        packs = (size - head) / Full::COUNT;
    }
    // Where the tail begins.
    __device__ __forceinline__ long long tail() const { return head + packs * Full::COUNT; }
    __device__ __forceinline__ long long pack(long long i) const { return head + i * Full::COUNT; }

    // `body(pack, where)` for each element of head and tail. Both are shorter than a pack, and so than a warp.
    template <typename Body>
    __device__ __forceinline__ void for_edges(const Element* data, int thread, const Body& body) const {
        if constexpr (PACKED) {
            Single one;
            const long long end = tail() + thread;
            if (thread < head) one.load(data + thread), body(one, static_cast<long long>(thread));
            if (end < size) one.load(data + end), body(one, end);
        }
    }
    // The same for each pack and each single element, dealt out to `threads` threads.
    template <typename Body>
    __device__ __forceinline__ void for_all(const Element* data, int thread, int threads, const Body& body) const {
        for_edges(data, thread, body);
        Full full;
#pragma unroll 4
        for (long long i = thread; i < packs; i += threads) full.load(data + pack(i)), body(full, pack(i));
    }
};
