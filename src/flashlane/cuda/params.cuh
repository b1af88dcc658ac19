// The parameters of the kernels of the mma, decode and fa1 families. flashlane.kernels.params mirrors the struct.
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
    float scale_log2;  // scale · log2(e) / q_fold
    float q_fold;      // a power of two by which Q is multiplied, exactly, so that f16 products do not overflow
};
