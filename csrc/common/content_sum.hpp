// Content sums on the path of this processor (docs/format.md, section 7.2).
#pragma once

#include <algorithm>
#include <vector>

#include "common/content_sum_avx512.hpp"
#include "common/content_sum_portable.hpp"
#include "common/parallel.hpp"

namespace packhorse {

template <bool kReplaces>
inline SumChange sum_words_any(const uint8_t* bytes, const uint8_t* before, std::size_t nbytes,
                               uint64_t first, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return sum_words_avx512<kReplaces>(bytes, before, nbytes, first);
#endif
    (void)isa;
    return sum_words<kReplaces>(bytes, before, nbytes, first);
}

// What bytes add to the sum of a tensor, in which they begin at `first_byte`, a multiple of 4.
inline ContentSum content_sum(const uint8_t* bytes, std::size_t nbytes, uint64_t first_byte,
                              Isa isa) {
    return sum_words_any<false>(bytes, nullptr, nbytes, first_byte / 4, isa).sum;
}

// The same if they replace others.
inline SumChange content_sum_change(const uint8_t* bytes, const uint8_t* before, std::size_t nbytes,
                                    uint64_t first_byte, Isa isa) {
    return sum_words_any<true>(bytes, before, nbytes, first_byte / 4, isa);
}

// The same for units that replace others (see sum_units()).
template <class Unit>
inline SumChange content_sum_change(const uint32_t* places, const Unit* units, const Unit* before,
                                    std::size_t n, uint64_t first_byte, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return sum_units_avx512(places, units, before, n, first_byte);
#endif
    (void)isa;
    return sum_units(places, units, before, n, first_byte);
}

// The sum of bytes that begin at `first_byte` of their tensor. Threads share the work.
inline ContentSum content_sum_threaded(const uint8_t* bytes, std::size_t nbytes,
                                       uint64_t first_byte, std::size_t threads, Isa isa) {
    constexpr std::size_t kPieceNbytes = std::size_t{1} << 18;
    const std::size_t n_pieces = (nbytes + kPieceNbytes - 1) / kPieceNbytes;
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, n_pieces));
    std::vector<ContentSum> sums(n_workers);
    parallel_for(n_pieces, n_workers, [&](std::size_t w, std::size_t piece) {
        const std::size_t at = piece * kPieceNbytes;
        sums[w].add(
            content_sum(bytes + at, std::min(kPieceNbytes, nbytes - at), first_byte + at, isa));
    });
    ContentSum sum;
    for (const ContentSum& part : sums) sum.add(part);
    return sum;
}

}  // namespace packhorse
