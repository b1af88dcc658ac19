// Where the queries and keys of a sequence lie, and how many there are: dense tensors, packed sequences (VARLEN), rows
// of a cache (CACHE), or pages (PAGED). flashlane.kernels.seqlen mirrors SeqlenParams.
//
// There are two forms, and both read SeqlenParams. SeqlenInfo is compiled for what a call has. CacheSeqlenInfo tests
// pointers for null when the kernel runs, because one build of the decode kernel serves every call; and it numbers keys
// by cache row, of which [first, end) are keys, so that a key's page follows from its number without an addition.
#pragma once
#include "ptx.cuh"

struct SeqlenParams {
    // What every call has comes first: parameters that a kernel reads lie in few lines of the constant cache.
    int batch;                                     // sequences
    int seqlen_q, seqlen_k;                        // of a sequence, or the longest; see TAIL for packed queries
    int bottom_right;                              // masks align by the last query and key, else by the first
    int page_size;                                 // PAGED
    const int *cu_seqlens_q, *cu_seqlens_k;        // VARLEN: first rows of the sequences, end of the last; or RANGES
    const int *seqused_k, *leftpad_k, *batch_idx;  // CACHE: null, or one number a sequence
    const int* block_table;                        // PAGED: (sequence, page)
    long long table_batch, table_page;             // its strides in elements

    // PAGED: which entry of a sequence's row of the block table has the page of a row of its cache, and the
    // row within it.
    __device__ __forceinline__ int page_entry(int row) const { return row / page_size; }
    template <typename Row>
    __device__ __forceinline__ Row row_in_page(Row row) const { return row % page_size; }
    __device__ __forceinline__ int row_in_page(int row, int entry) const { return row - entry * page_size; }
    // A row that no page has. TMA writes zeros for what lies outside the map.
    __device__ __forceinline__ int row_outside_page() const { return page_size; }
};

// Packed queries: rows after the last sequence.
//     ONE_MORE_SEQUENCE  they count as one more sequence, without keys, and seqlen_q is the number of all rows
//     IGNORED            no sequence is longer than seqlen_q, which bounds the blocks that were prepared for it
//     RANGES             no sequence has them. cu_seqlens_* hold the first row and the end of each sequence, and
//                        cu_seqlens_k its shift besides, so that sequences come in any order, ranges of keys may
//                        overlap, and a window may reach past the last key
enum class Tail { ONE_MORE_SEQUENCE, IGNORED, RANGES };

// The queries alone, for a kernel that needs no keys.
template <bool VARLEN, Tail TAIL>
struct QuerySeqlenInfo {
    int q_first, q_length;
    int q_batch;                   // row of the batch axis of q

    __device__ __forceinline__ QuerySeqlenInfo(const SeqlenParams& p, int batch)
        : q_first(0), q_length(p.seqlen_q), q_batch(batch) {
        if constexpr (VARLEN && TAIL == Tail::RANGES) {
            const int2 rows = reinterpret_cast<const int2*>(p.cu_seqlens_q)[batch];
            q_first = rows.x, q_length = rows.y - rows.x, q_batch = 0;
        } else if constexpr (VARLEN) {
            q_first = p.cu_seqlens_q[batch], q_batch = 0;
            if constexpr (TAIL == Tail::IGNORED) q_length = min(q_length, p.cu_seqlens_q[batch + 1] - q_first);
            else q_length = (batch == p.batch ? p.seqlen_q : p.cu_seqlens_q[batch + 1]) - q_first;
        }
    }
};

template <bool VARLEN, bool CACHE, bool PAGED, Tail TAIL>
struct SeqlenInfo : QuerySeqlenInfo<VARLEN, TAIL> {
    int k_first, k_length;
    int k_batch;                   // row of the batch axis of k and v, or of the block table
    int shift;                     // query i is aligned with key i + shift

    __device__ __forceinline__ SeqlenInfo(const SeqlenParams& p, int batch)
        : QuerySeqlenInfo<VARLEN, TAIL>(p, batch), k_first(0), k_length(p.seqlen_k), k_batch(batch) {
        if constexpr (VARLEN && TAIL == Tail::RANGES) {
            const int* keys = p.cu_seqlens_k + 3 * batch;
            k_first = keys[0], k_length = keys[1] - keys[0], k_batch = 0;
            shift = keys[2];
            return;
        } else if constexpr (VARLEN) {
            const bool after_last = TAIL == Tail::ONE_MORE_SEQUENCE && batch == p.batch;
            k_first = after_last ? 0 : p.cu_seqlens_k[batch], k_batch = 0;
            k_length = after_last ? 0 : p.cu_seqlens_k[batch + 1] - k_first;
            if (PAGED) k_first = 0, k_batch = batch;
        } else if constexpr (CACHE) {
            const int end = p.seqused_k == nullptr ? p.seqlen_k : max(0, min(p.seqused_k[batch], p.seqlen_k));
            k_first = p.leftpad_k == nullptr ? 0 : max(0, min(p.leftpad_k[batch], end));
            k_length = end - k_first;
            if (p.batch_idx != nullptr) k_batch = p.batch_idx[batch];
        }
        shift = p.bottom_right ? k_length - this->q_length : 0;
    }
};

struct CacheSeqlenInfo {
    int seqlen_q, first, end;      // the rows [first, end) of the cache are keys
    int shift;                     // cache row on the diagonal of query 0
    long long q_start, k_start;    // rows of packed tensors
    int cache_row;                 // row of the batch axis of k and v
    const int* table;

    CacheSeqlenInfo() = default;
    __device__ __forceinline__ CacheSeqlenInfo(const SeqlenParams& p, int batch)
        : seqlen_q(p.seqlen_q), first(0), end(p.seqlen_k), q_start(0), k_start(0), cache_row(batch), table(nullptr) {
        // All loads come before the first use, since each takes the latency of device memory. The host does not check
        // values that lie on the GPU, so they are clamped here: nothing is read outside the cache.
        const int q_from = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0,
                  q_to = p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] : 0;
        const int k_from = p.cu_seqlens_k ? p.cu_seqlens_k[batch] : 0,
                  k_to = p.cu_seqlens_k ? p.cu_seqlens_k[batch + 1] : 0;
        const int used = p.seqused_k ? p.seqused_k[batch] : end, pad = p.leftpad_k ? p.leftpad_k[batch] : 0;
        if (p.batch_idx) cache_row = p.batch_idx[batch];
        if (p.cu_seqlens_q) seqlen_q = min(q_to - q_from, p.seqlen_q), q_start = q_from;
        if (p.cu_seqlens_k) {
            end = min(k_to - k_from, p.seqlen_k);
            if (!p.block_table) k_start = k_from;
        }
        if (p.cu_seqlens_q) cache_row = 0;
        end = max(0, min(used, end)), first = max(0, min(pad, end));
        shift = p.bottom_right ? end - seqlen_q : first;
        if (p.block_table) table = p.block_table + batch * p.table_batch;
    }
};
