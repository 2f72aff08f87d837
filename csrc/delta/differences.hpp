// Cuts the differences of a block into tokens and raw bits, and joins them again (docs/format.md,
// 6.6). Tokens that are not direct have extra bits, so callers handle them one by one.
// AVX-512 does all steps in registers (delta/differences_avx512.hpp). Everything else does them
// one after the other, in loops that compilers vectorise.
#pragma once

#include "common/dispatch.hpp"
#include "delta/differences_avx512.hpp"
#include "delta/order.hpp"

namespace packhorse {

// Cuts the differences of at most kDeltaBlockUnits units into rows. Tokens that are not direct
// become kLongMark. Bits of a unit's raw bytes above its shift are undefined.
template <class Unit, bool kFloat>
inline void cut_differences(const uint8_t* src, const uint8_t* base, const uint8_t* keys,
                            std::size_t n, const DeltaRule& rule, uint32_t n_rows, BlockRows& rows,
                            Isa isa) {
    using Signed = std::make_signed_t<Unit>;
    std::size_t done = 0;
#if PACKHORSE_X86
    if constexpr (sizeof(Unit) == 2 || sizeof(Unit) == 4)
        if (isa >= Isa::kAvx512)
            done = cut_differences_avx512<Unit, kFloat>(src, base, keys, n, rule, n_rows, rows);
#endif
    if (done == n) return;
    src += done * sizeof(Unit);
    base += done * sizeof(Unit);
    n -= done;
    alignas(64) Unit memory[kDeltaBlockUnits];
    Unit* const differences = memory;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        Unit* __restrict out = differences;
        for (std::size_t i = 0; i < n; ++i)
            out[i] =
                static_cast<Unit>(to_ordered<Unit, kFloat>(load<Unit>(src + i * sizeof(Unit))) -
                                  to_ordered<Unit, kFloat>(load<Unit>(base + i * sizeof(Unit))));
    });
    uint8_t* const shifts = rows.shifts;
    fill_shifts(keys + done, n, rule, shifts, isa);
    const auto cut_tokens = [=](uint8_t* to, auto shift_of) PACKHORSE_VECTORISED {
        uint8_t* __restrict out = to;
        for (std::size_t i = 0; i < n; ++i) {
            const auto t = static_cast<Unit>(static_cast<Signed>(differences[i]) >> shift_of(i));
            const auto direct = static_cast<Unit>(t + static_cast<Unit>(kTokenBias));
            out[i] = direct < kDeltaDirectTokens ? static_cast<uint8_t>(direct) : kLongMark;
        }
    };
    uint8_t* const tokens = rows.at[0] + done;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        if (n_rows == 1)  // no class has raw bits
            cut_tokens(tokens, [](std::size_t) { return 0; });
        else
            cut_tokens(tokens, [=](std::size_t i) { return shifts[i]; });
    });
    for (uint32_t p = 1; p < n_rows; ++p) {
        uint8_t* const bytes = rows.at[p] + done;
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            uint8_t* __restrict out = bytes;
            for (std::size_t i = 0; i < n; ++i)
                out[i] = static_cast<uint8_t>(differences[i] >> (8 * p - 8));
        });
    }
}

// Adds the differences of at most kDeltaBlockUnits units to their bases. Tokens that are not direct
// count as zero. `dst` may be `base`.
template <class Unit, bool kFloat>
inline void join_differences(const BlockRows& rows, uint32_t n_rows, std::size_t n,
                             const uint8_t* base, uint8_t* dst, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if constexpr (sizeof(Unit) == 2 || sizeof(Unit) == 4)
        if (isa >= Isa::kAvx512)
            done = join_differences_avx512<Unit, kFloat>(rows, n_rows, n, base, dst);
#endif
    if (done == n) return;
    n -= done;
    alignas(64) Unit memory[kDeltaBlockUnits];
    Unit* const units = memory;
    const uint8_t* const shifts = rows.shifts + done;
    const uint8_t* const tokens = rows.at[0] + done;
    const auto join_tokens = [=](auto shift_of) PACKHORSE_VECTORISED {
        Unit* __restrict out = units;
        for (std::size_t i = 0; i < n; ++i) {
            const int t = (tokens[i] & kLongBit) != 0 ? 0 : int{tokens[i]} - kTokenBias;
            out[i] =
                static_cast<Unit>(static_cast<Wide<Unit>>(static_cast<int64_t>(t)) << shift_of(i));
        }
    };
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        if (n_rows == 1)
            join_tokens([](std::size_t) { return 0; });
        else
            join_tokens([=](std::size_t i) { return shifts[i]; });
    });
    for (uint32_t p = 1; p < n_rows; ++p) {
        const uint8_t* const bytes = rows.at[p] + done;
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            Unit* __restrict out = units;
            for (std::size_t i = 0; i < n; ++i)
                out[i] = static_cast<Unit>(out[i] | Wide<Unit>{bytes[i]} << (8 * p - 8));
        });
    }
    const uint8_t* const from = base + done * sizeof(Unit);
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        Unit* __restrict out = units;
        for (std::size_t i = 0; i < n; ++i)
            out[i] = from_ordered<Unit, kFloat>(static_cast<Unit>(
                to_ordered<Unit, kFloat>(load<Unit>(from + i * sizeof(Unit))) + out[i]));
    });
    std::memcpy(dst + done * sizeof(Unit), units, n * sizeof(Unit));
}

}  // namespace packhorse
