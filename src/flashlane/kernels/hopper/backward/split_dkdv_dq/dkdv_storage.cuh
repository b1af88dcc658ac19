// The shared memory of the dK and dV kernel.
#pragma once
#include "attention/pipeline.cuh"
#include "cluster.cuh"
#include "hopper/backward/gemm.cuh"
#include "hopper/backward/work_tile.cuh"
#include "hopper_clustered.cuh"  // CLUSTERED

constexpr int BLOCK_N = 64, CLUSTER = cfg::CLUSTER, CLUSTER_KEYS = BLOCK_N * CLUSTER, THREADS = WARPGROUP * 3;
constexpr int Q_STAGES = cfg::Q_STAGES, DO_STAGES = cfg::DO_STAGES, P_STAGES = 2;
constexpr u32 KEYS_CHUNK = BLOCK_N * ROW_BYTES, ROWS_CHUNK = BLOCK_M * ROW_BYTES;
constexpr u32 K_BYTES = QK_CHUNKS * KEYS_CHUNK, V_BYTES = V_CHUNKS * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK;
constexpr u32 VECTORS_BYTES = 16 * WARPGROUP, P_BYTES = BLOCK_M / 16 * VECTORS_BYTES, STAT_BYTES = BLOCK_M * 4;
constexpr int CTA_ROWS = BLOCK_M / CLUSTER;               // rows of Q and dO that one CTA of the cluster loads
static_assert(BLOCK_M % 16 == 0 && CTA_ROWS % 8 == 0 && (CLUSTER == 1 || CLUSTER == 2));

struct CtaStorage {
    unsigned char k[K_BYTES], v[V_BYTES], q[Q_STAGES][Q_BYTES], dout[DO_STAGES][DO_BYTES], p[P_STAGES][P_BYTES];
    float lse[Q_STAGES][BLOCK_M], delta[DO_STAGES][BLOCK_M];
    u64 k_full, v_full;
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], do_full[DO_STAGES], do_empty[DO_STAGES], p_full[P_STAGES],
        p_empty[P_STAGES];
};
template <int CTAS>
struct Storage {
    CtaStorage cta;
    u64 q_peer[Q_STAGES], do_peer[DO_STAGES];             // the stage is empty in the peer CTA, too
};
template <>
struct Storage<1> {
    CtaStorage cta;
};
using SharedStorage = Storage<CLUSTER>;
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// The address of a member; `base` is that of the struct.
#define SMEM(member) (base + static_cast<u32>(offsetof(CtaStorage, member)))
#define SMEM_PEER(member) (base + static_cast<u32>(offsetof(Storage<2>, member)))

// The other warpgroup receives P · 2^15 in f16, which then has its full precision down to P = 2^-29.
constexpr float P_EXPONENT = 15.f, P_INVERSE = 1.f / 32768.f;
