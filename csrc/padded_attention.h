// Minimise the largest linear * (sum of lengths) + quadratic * count * longest^2.
#pragma once

#include "classes.h"

namespace motet {

struct AttentionCost {
    std::int64_t linear, quadratic;  // >= 1; all items on one rank must fit

    std::int64_t alone(std::int64_t length) const { return length * (linear + quadratic * length); }
};

GroupedPlacement padded_attention(Weights lengths, int num_ranks, std::int64_t linear, std::int64_t quadratic);

// padded_attention_bound.cpp: no placement has a smaller largest load; low is such a bound already, high is reached.
std::int64_t padded_attention_bound(const Classes& classes, int num_ranks, AttentionCost cost, std::int64_t low,
                                    std::int64_t high);

}  // namespace motet
