// Byte shuffles for each of the 256 sets of eight places.
#pragma once

#include "common/layout.hpp"

namespace packhorse {

struct alignas(64) PlaceShuffles {
    uint8_t compress[256][8];  // moves the bytes at these places together
    uint8_t expand[256][8];    // moves as many bytes to these places, and zero to the others
};

constexpr PlaceShuffles make_place_shuffles() {
    PlaceShuffles shuffles{};
    for (uint32_t set = 0; set < 256; ++set) {
        uint8_t n = 0;
        for (uint8_t place = 0; place < 8; ++place) {
            shuffles.expand[set][place] = 0xFF;
            if ((set >> place & 1) == 0) continue;
            shuffles.expand[set][place] = n;
            shuffles.compress[set][n++] = place;
        }
    }
    return shuffles;
}

inline constexpr PlaceShuffles kPlaceShuffles = make_place_shuffles();

}  // namespace packhorse
