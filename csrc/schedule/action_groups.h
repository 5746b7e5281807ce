// The actions of a Program by stage, kind and microbatch.
#pragma once

#include <algorithm>
#include <tuple>

#include "communication.h"

namespace motet {

constexpr std::int32_t none = -1;

class ActionGroups {
   public:
    explicit ActionGroups(const Bare& bare) : bare_(bare), slot_of_(num_kinds, none) {
        std::int32_t num_slots = 0;
        for (const auto kind : bare.kind) {
            if (slot_of_[kind] == none) slot_of_[kind] = num_slots++;
        }
        offset_.assign(num_slots * bare.stage_rank.size() * (bare.num_microbatches + 1) + 1, 0);
        const auto count = static_cast<std::int32_t>(bare.kind.size());
        for (std::int32_t action = 0; action < count; ++action) ++offset_[key_of(action) + 1];
        for (std::size_t key = 0; key + 1 < offset_.size(); ++key) offset_[key + 1] += offset_[key];
        members_.resize(count);
        auto next = offset_;
        for (std::int32_t action = 0; action < count; ++action) members_[next[key_of(action)]++] = action;
        const auto less = [&](auto a, auto b) {
            return std::tie(bare.part[a], bare.peer[a]) < std::tie(bare.part[b], bare.peer[b]);
        };
        for (std::size_t key = 0; key + 1 < offset_.size(); ++key) {
            if (offset_[key + 1] - offset_[key] < 2) continue;
            std::stable_sort(members_.begin() + offset_[key], members_.begin() + offset_[key + 1], less);
        }
    }

    // All of a stage, a kind and a microbatch (-1: the step), by part and peer.
    std::span<const std::int32_t> of(std::int32_t stage, std::int32_t kind, std::int32_t microbatch) const {
        if (slot_of_[kind] == none) return {};
        const auto key = key_of(stage, kind, microbatch);
        return std::span(members_).subspan(offset_[key], offset_[key + 1] - offset_[key]);
    }

    std::int32_t find(std::int32_t stage, std::int32_t kind, std::int32_t microbatch, std::int32_t part,
                      std::int32_t peer = none) const {
        const auto group = of(stage, kind, microbatch);
        const auto found = std::lower_bound(group.begin(), group.end(), std::tie(part, peer), [&](auto a, auto wanted) {
            return std::tie(bare_.part[a], bare_.peer[a]) < wanted;
        });
        if (found == group.end() || bare_.part[*found] != part || bare_.peer[*found] != peer) return none;
        return *found;
    }

    // The last part of a pass.
    std::int32_t last(std::int32_t stage, std::int32_t kind, std::int32_t microbatch) const {
        const auto group = of(stage, kind, microbatch);
        return group.empty() ? none : group.back();
    }

    // Whether two actions are the same, or a pass has a peer.
    bool is_odd() const {
        for (std::size_t key = 0; key + 1 < offset_.size(); ++key) {
            for (auto at = offset_[key]; at < offset_[key + 1]; ++at) {
                const auto action = members_[at];
                if (bare_.kind[action] <= R && bare_.peer[action] != none) return true;
                if (at == offset_[key]) continue;
                const auto before = members_[at - 1];
                if (bare_.part[action] == bare_.part[before] && bare_.peer[action] == bare_.peer[before]) return true;
            }
        }
        return false;
    }

   private:
    std::size_t key_of(std::int32_t stage, std::int32_t kind, std::int32_t microbatch) const {
        return (slot_of_[kind] * bare_.stage_rank.size() + stage) * (bare_.num_microbatches + 1) + microbatch + 1;
    }

    std::size_t key_of(std::int32_t action) const {
        return key_of(bare_.stage[action], bare_.kind[action], bare_.microbatch[action]);
    }

    const Bare& bare_;
    std::vector<std::int32_t> slot_of_;  // by kind, for the kinds that there are
    std::vector<std::int32_t> offset_, members_;
};

}  // namespace motet
