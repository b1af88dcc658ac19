// What a forward kernel is given, and which part of it one block does. flashlane.kernels.params mirrors the struct.
#pragma once

// Strides are counted in elements and are 64 bits wide; q is (batch, row, head, column), and so on. The output's
// columns are contiguous. The LSE is (batch, head, row), contiguous.
template <typename Element>
struct AttentionParams {
    const Element *q, *k, *v;
    Element* out;
    float* lse;
    long long q_batch, q_row, q_head, q_column;
    long long k_batch, k_row, k_head, k_column;
    long long v_batch, v_row, v_head, v_column;
    long long out_batch, out_row, out_head;
    int batch, heads, group;  // group: query heads that share a key/value head
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int window_left, window_right, shift;
    int q_blocks, heads_per_section;
    float scale_log2;  // scale · log2(e), or what is left of it after the fold
    float q_fold;      // power of two multiplied into Q, exactly, before an f16 product can overflow
};

// Which head and rows a block works on. Heads go in groups whose K and V fit the L2 cache together; within a group
// the last query rows come first, as under a causal mask they have the most work.
template <int ROWS>
struct Block {
    int batch, head, row;

    template <typename Params>
    __device__ __forceinline__ explicit Block(const Params& p) {
        const int per_group = p.q_blocks * p.heads_per_section;
        const int group = blockIdx.x / per_group, inside = blockIdx.x % per_group;
        const int first = group * p.heads_per_section;
        const int together = min(p.heads_per_section, p.batch * p.heads - first);
        const int flat = first + inside % together;
        batch = flat / p.heads, head = flat % p.heads;
        row = (p.q_blocks - 1 - inside / together) * ROWS;
    }
};
