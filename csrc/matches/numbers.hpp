// Units become numbers and numbers become units again (docs/format.md, section 6.8). All arithmetic
// is modulo two to the bits of a unit.
#pragma once

#include <bit>
#include <limits>
#include <type_traits>

#include "common/dispatch.hpp"
#include "matches/stream.hpp"
#include "planes/histogram.hpp"

namespace packhorse {

// Calls `work` with an unsigned integer of `nbytes` bytes.
template <class Work>
inline auto with_integer(uint32_t nbytes, const Work& work) {
    switch (nbytes) {
        case 1:
            return work(uint8_t{});
        case 2:
            return work(uint16_t{});
        case 4:
            return work(uint32_t{});
        default:
            return work(uint64_t{});
    }
}

// The least and the greatest value of some units or of their differences, which are read as signed
// numbers.
template <class Unit>
struct Range {
    std::make_signed_t<Unit> least;
    std::make_signed_t<Unit> most;

    // Bytes of the numbers that remain once the least value, less `below`, is taken from each.
    uint32_t number_nbytes(uint64_t below = 0) const {
        const auto unsigned_width =
            static_cast<Unit>(static_cast<Unit>(most) - static_cast<Unit>(least));
        const uint64_t width = uint64_t{unsigned_width} + below;
        if (width <= 0xFF) return 1;
        if (width <= 0xFFFF) return 2;
        return width <= 0xFFFFFFFF ? 4 : 8;
    }
};

template <class Unit, bool kDifferences>
PACKHORSE_INLINE Range<Unit> range_of(const Unit* units, std::size_t n) {
    using Signed = std::make_signed_t<Unit>;
    Signed least = std::numeric_limits<Signed>::max(), most = std::numeric_limits<Signed>::min();
    for (std::size_t i = kDifferences ? 1 : 0; i < n; ++i) {
        const Unit unit = kDifferences ? static_cast<Unit>(units[i] - units[i - 1]) : units[i];
        const auto value = static_cast<Signed>(unit);
        least = value < least ? value : least;
        most = value > most ? value : most;
    }
    return {least, most};
}

template <class Unit, bool kDifferences>
inline Range<Unit> find_range(const Unit* units, std::size_t n, Isa isa) {
    Range<Unit> found{};
    Range<Unit>* const out = &found;
    vectorised_wide(isa,
                    [=]() PACKHORSE_VECTORISED { *out = range_of<Unit, kDifferences>(units, n); });
    return found;
}

constexpr std::size_t kNumberSampleRun = 1024;
constexpr std::size_t kMaxNumberSampleRuns = 8;

// How many numbers are counted: all of a sample, or those that differ from the one before.
enum class Counted { kAll, kFresh };

// Estimates what numbers cost without matches, in 2^-16 bits each: the entropy of their bytes in a
// sample of runs, which are spread.
template <class Unit, Counted kCounted = Counted::kAll>
inline uint64_t number_cost(const Unit* units, std::size_t n, const NumberRule& rule,
                            std::size_t most_of_run = kNumberSampleRun) {
    Histogram bytes[sizeof(Unit)] = {};
    const std::size_t run = std::min(n, most_of_run);
    const std::size_t n_runs = std::min(kMaxNumberSampleRuns, n / run);
    const auto base = static_cast<Unit>(rule.base);
    uint32_t total = 0;
    for (std::size_t r = 0; r < n_runs; ++r) {
        const std::size_t first = r * (n / n_runs);
        Unit last = 0;
        for (std::size_t i = first + (rule.differences ? 1 : 0); i < first + run; ++i) {
            const Unit before = rule.differences ? units[i - 1] : Unit{0};
            const auto number = static_cast<Unit>(units[i] - before - base);
            const bool counts = kCounted == Counted::kAll || number != last;
            last = number;
            if (!counts) continue;
            ++total;
            for (uint32_t b = 0; b < rule.nbytes; ++b)
                ++bytes[b].counts[uint64_t{number} >> (8 * b) & 0xFF];
        }
    }
    if (total == 0) return 0;
    uint64_t cost = 0;
    for (uint32_t b = 0; b < rule.nbytes; ++b) {
        bytes[b].total = total;
        cost += entropy_cost(bytes[b]);
    }
    return cost / total;
}

// Small differences on both sides of zero are frequent. If zero is a number in the middle of the
// values of its upper bytes, and not far above the least value of its low byte, then most of them
// differ in that byte alone.
constexpr uint64_t kLowZero = 0x20, kMiddleZero = 0x4000;

// Lowers the base of differences so far that zero becomes a number of such a form, if numbers take
// no more bytes and cost less. `cost` is that of a number.
template <class Unit>
inline void align_differences(const Unit* units, std::size_t n, const Range<Unit>& steps,
                              NumberRule& rule, uint64_t& cost) {
    for (const uint64_t zero : {kLowZero, kMiddleZero | kLowZero}) {
        const uint64_t period = zero > 0xFF ? 0x10000 : 0x100;
        if (8 * rule.nbytes <= static_cast<uint32_t>(std::countr_zero(period))) return;
        NumberRule tried = rule;
        const uint64_t zero_now = uint64_t{0} - static_cast<uint64_t>(steps.least);
        const uint64_t below = (zero - zero_now) % period;
        tried.base = static_cast<Unit>(static_cast<uint64_t>(steps.least) - below);
        if (steps.number_nbytes(below) > rule.nbytes) continue;
        const uint64_t tried_cost = number_cost(units, n, tried);
        if (tried_cost >= cost) continue;
        cost = tried_cost;
        rule = tried;
    }
}

// Chooses how `n` >= 1 units become numbers. Differences hide what repeats, so they must save a
// sixteenth. `cost` becomes that of a literal, in 2^-16 bits. Numbers that equal the one before are
// hardly ever literals, but for small differences.
template <class Unit>
inline NumberRule choose_numbers(const Unit* units, std::size_t n, uint64_t& cost, Isa isa) {
    const Range<Unit> plain = find_range<Unit, false>(units, n, isa);
    const NumberRule rule{plain.number_nbytes(), false, static_cast<Unit>(plain.least), 0};
    const auto take_plain = [&] {
        cost = number_cost<Unit, Counted::kFresh>(units, n, rule);
        return rule;
    };
    if (n < 3 || sizeof(Unit) == 1) return take_plain();
    cost = number_cost(units, n, rule);
    const Range<Unit> steps = find_range<Unit, true>(units, n, isa);
    NumberRule by_steps{steps.number_nbytes(), true, static_cast<Unit>(steps.least), 0};
    uint64_t step_cost = number_cost(units, n, by_steps);
    align_differences(units, n, steps, by_steps, step_cost);
    if (step_cost >= cost - cost / 16) return take_plain();
    cost = step_cost;
    by_steps.before = static_cast<Unit>(units[0] - static_cast<Unit>(by_steps.base));
    return by_steps;
}

template <class Unit, class Number>
inline void make_numbers(const Unit* units, std::size_t n, const NumberRule& rule, Number* numbers,
                         Isa isa) {
    const auto base = static_cast<Unit>(rule.base);
    if (!rule.differences) {
        vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                numbers[i] = static_cast<Number>(static_cast<Unit>(units[i] - base));
        });
        return;
    }
    numbers[0] = static_cast<Number>(units[0] - static_cast<Unit>(rule.before) - base);
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 1; i < n; ++i)
            numbers[i] = static_cast<Number>(static_cast<Unit>(units[i] - units[i - 1] - base));
    });
}

// The inverse. `dst` need not be aligned.
template <class Unit, class Number>
inline void restore_units(const Number* numbers, std::size_t n, const NumberRule& rule,
                          uint8_t* dst, Isa isa) {
    const auto base = static_cast<Unit>(rule.base);
    if (!rule.differences) {
        vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                store(dst + i * sizeof(Unit), static_cast<Unit>(numbers[i] + base));
        });
        return;
    }
    auto unit = static_cast<Unit>(rule.before);
    for (std::size_t i = 0; i < n; ++i) {
        unit = static_cast<Unit>(unit + numbers[i] + base);
        store(dst + i * sizeof(Unit), unit);
    }
}

}  // namespace packhorse
