// Bases of parameters and of shared memory that only some configurations have.
#pragma once

// Parts that a configuration does not need take no space: they are empty bases.
template <bool WANTED, typename Part>
struct Optional : Part {};
template <typename Part>
struct Optional<false, Part> {};
