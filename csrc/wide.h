// MOTET_WIDE: a function marked so is compiled twice, and the form that the machine can run is chosen when the core is
// loaded. Its loops must be of integers, or of floats without reductions: so that both forms give the same bits.
#pragma once

#include <cstdint>  // says which C library this is

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MOTET_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define MOTET_WIDE
#endif
