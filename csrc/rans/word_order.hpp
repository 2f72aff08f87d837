// How eight lanes take the next words of a stream, or write theirs, for paths that shuffle bytes.
#pragma once

#include "common/layout.hpp"

namespace packhorse {

// For each of the 256 sets of lanes that need a word: a byte shuffle that moves the next words to
// these lanes and leaves zero in the others. AVX2 may load the 16 bytes before a shuffle, too.
struct alignas(64) WordOrder {
    uint8_t before[64];
    uint8_t byte_of_place[256][16];
};

constexpr WordOrder make_word_order() {
    WordOrder order{};
    for (uint32_t mask = 0; mask < 256; ++mask) {
        uint8_t next = 0;
        for (uint32_t lane = 0; lane < 8; ++lane) {
            const bool needs = mask >> lane & 1;
            order.byte_of_place[mask][2 * lane] = needs ? next : uint8_t{0x80};
            order.byte_of_place[mask][2 * lane + 1] =
                needs ? static_cast<uint8_t>(next + 1) : uint8_t{0x80};
            if (needs) next = static_cast<uint8_t>(next + 2);
        }
    }
    return order;
}

inline constexpr WordOrder kWordOrder = make_word_order();

// For each of the 256 sets of lanes that keep their words: a byte shuffle that moves the words of
// the other lanes to the top.
struct alignas(64) EmitOrder {
    uint8_t byte_at[256][16];
};

constexpr EmitOrder make_emit_order() {
    EmitOrder order{};
    for (uint32_t keeps = 0; keeps < 256; ++keeps) {
        uint32_t place = 8;
        for (uint32_t lane = 8; lane-- > 0;) {
            if (keeps >> lane & 1) continue;
            --place;
            order.byte_at[keeps][2 * place] = static_cast<uint8_t>(2 * lane);
            order.byte_at[keeps][2 * place + 1] = static_cast<uint8_t>(2 * lane + 1);
        }
        for (uint32_t i = 0; i < 2 * place; ++i) order.byte_at[keeps][i] = 0x80;
    }
    return order;
}

inline constexpr EmitOrder kEmitOrder = make_emit_order();

}  // namespace packhorse
