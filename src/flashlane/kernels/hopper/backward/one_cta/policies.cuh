// What the variants of the one-CTA backward differ in. Python picks one type for each question (one_cta/config.py); a
// combination that would not work has no type.
#pragma once
#include "config.cuh"

// Where dQ is made from dq_accum.
enum class Postprocess {
    OWN_LAUNCH,                    // postprocess.cu, after this kernel
    IDLE_WARPS                     // in_kernel_dq.cuh: as far as idle warps get, and postprocess.cu does the rest
};

// How dQ is added to dq_accum.

// By red.global from the accumulator's registers, in any order.
struct RegisterAtomics {
    static constexpr bool TMA = false, IN_ORDER = false;
    static constexpr Postprocess POSTPROCESS = Postprocess::OWN_LAUNCH;
};
// The same. Idle warps zero dq_accum and write dQ, once a semaphore says that all tiles of a head have added.
struct RegisterAtomicsInKernelDq {
    static constexpr bool TMA = false, IN_ORDER = false;
    static constexpr Postprocess POSTPROCESS = Postprocess::IDLE_WARPS;
};
// Through shared memory, from which a dQ-store warp adds it by TMA reduce-add, in any order.
struct TmaReduceAdd {
    static constexpr bool TMA = true, IN_ORDER = false;
    static constexpr Postprocess POSTPROCESS = Postprocess::OWN_LAUNCH;
};
// The same; the n-blocks add to an m-block in their order, which semaphores keep. dQ has the same bits at every run.
struct OrderedTmaReduceAdd {
    static constexpr bool TMA = true, IN_ORDER = true;
    static constexpr Postprocess POSTPROCESS = Postprocess::OWN_LAUNCH;
};

// From the registers in order: a consumer acquires the semaphore, and a dQ-store warp releases what it has added.
struct OrderedRegisterAtomics {
    static constexpr bool TMA = false, IN_ORDER = true;
    static constexpr Postprocess POSTPROCESS = Postprocess::OWN_LAUNCH;
};

// How tiles are divided among CTAs.
struct WholeTiles {
    static constexpr bool SPLIT_Q = false;
};
// Some tiles are split along their queries, so that all SMs are done at about the same time. All but the last split
// of a tile leave their dK and dV in device memory, where the last one adds them to its own, in their order. Additions
// to dQ that have an order are of whole tiles, as a semaphore counts n-blocks.
struct SplitQ {
    static constexpr bool SPLIT_Q = true;
};

// Ping-pong scheduling: one consumer warpgroup issues S and dP while the other has its scores, so that they do
// not leave the tensor cores idle at the same time. The other may issue when the products are issued, or when
// they are complete.
enum class PingPong { OFF, UNTIL_ISSUED, UNTIL_COMPLETE };

// OWN_LOOPS: each consumer warpgroup has a copy of the loop, in which its number is a constant. That is fewer
// instructions, and the two may differ.

// Where dK and dV of a tile lie until they are stored.
enum class Staging {
    REGISTERS,                     // nowhere else: the consumers store them
    BOTH,                          // in shared memory with room for both, until TMA has read them
    IN_TURN,                       // in shared memory with room for one of them, dV first
    DS_AND_DQ,                     // dV where dS was, and dK where dQ was, which the next tile needs after its keys
    DQ_AND_DS,                     // dV where dQ was, under the last dQ of the tile; and dK where dS was
    DS_AND_ROOM                    // where dS was, but for a chunk of dK, for which there is room
};

// SKIPS_HIDDEN: a consumer whose keys are hidden in a step, by lists, a mask or the end of the keys, makes no products
// of them.

// PEELED: the first step of a tile is a copy of the loop's body without dQ, in place of zeros that are taken for the dS
// of a step before.

#include "one_cta_policies.cuh"  // using Dq, using Partition, PING_PONG, OWN_LOOPS, STAGING, SKIPS_HIDDEN, PEELED

constexpr bool IN_KERNEL_DQ = Dq::POSTPROCESS == Postprocess::IDLE_WARPS;
// Warps that take what consumers have made of dQ: to add it, or to release it when it is added.
constexpr bool DQ_STORE_WARPS = Dq::TMA || Dq::IN_ORDER;
constexpr bool IN_KERNEL_ZEROS = cfg::ZEROING_CTAS > 0 && !IN_KERNEL_DQ;  // of heads after the first ones
constexpr bool SPLIT_Q = Partition::SPLIT_Q;
static_assert(!(SPLIT_Q && Dq::IN_ORDER));
static_assert(!SKIPS_HIDDEN || !cfg::QUERY_RANGES, "a step's alignment is that of its range");
static_assert(!cfg::VARLEN || cfg::ZEROING_CTAS == 0, "tiles of packed sequences are counted on the GPU");
