// Puts rows back where they were.
#pragma once

#include "repeats/tokens.hpp"

namespace packhorse {

// What a message says of its rows.
struct RowLayout {
    std::size_t row_nbytes;
    std::size_t skipped_nbytes;  // before the first whole row
    std::size_t literals_nbytes;
};

// Makes bytes [start, stop) of `memory`, at whose end the literals lie. Repeats may be of any bytes
// before them. Returns whether all lengths and tokens fit each other; otherwise bytes from `start`
// on are undefined. Nothing outside of [start, stop) is written, whatever the arguments are.
inline bool restore_rows(uint8_t* memory, std::size_t start, std::size_t stop,
                         const RowLayout& layout, const uint8_t* tokens,
                         std::size_t tokens_nbytes) {
    const std::size_t row_nbytes = layout.row_nbytes, skipped = layout.skipped_nbytes;
    const std::size_t nbytes = stop - start;
    if (!is_row_length(row_nbytes) || skipped >= row_nbytes || skipped > nbytes) return false;
    const std::size_t n_rows = (nbytes - skipped) / row_nbytes;
    const std::size_t rest = (nbytes - skipped) % row_nbytes;
    if (layout.literals_nbytes > nbytes || layout.literals_nbytes < skipped + rest) return false;
    uint8_t* at = memory + start;
    const uint8_t* literal = memory + (stop - layout.literals_nbytes);
    const uint8_t* const last_literal = memory + (stop - rest);
    const auto take = [&](std::size_t n) {  // the literals never lie before `at`
        if (literal != at) std::memmove(at, literal, n);
        literal += n, at += n;
    };
    take(skipped);
    TokenReader reader(tokens, tokens_nbytes);
    for (std::size_t row = 0; row < n_rows; ++row) {
        const std::size_t distance = reader.next();
        if (distance == 0) {
            if (static_cast<std::size_t>(last_literal - literal) < row_nbytes) return false;
            take(row_nbytes);
            continue;
        }
        const std::size_t before = distance * row_nbytes;
        if (before > static_cast<std::size_t>(at - memory)) return false;
        if (static_cast<std::size_t>(literal - at) < row_nbytes) return false;
        std::memcpy(at, at - before, row_nbytes);
        at += row_nbytes;
    }
    if (literal != last_literal || !reader.is_at_end()) return false;
    take(rest);
    return true;
}

}  // namespace packhorse
