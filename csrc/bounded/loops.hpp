// Loops of bounded codes: rows of 16 elements to codes and back, and blocks of 512 to words and
// escapes and back (docs/format.md, section 13).
//
// This file is included once for each instruction set, in a namespace of its own. PACKHORSE_LOOP is
// then the attributes of that set, kVectorNbytes the width of its registers, and escapes_among() is
// defined. The 16 lanes of a block are taken in groups that fill a register: all rows of the first
// group, then all rows of the next. The vectors are those of GCC and clang, which become the
// instructions that the function around them may use. They are passed by reference: how they are
// passed by value depends on the instruction set.

template <class T, std::size_t kLanes>
struct VectorOf {
    typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};

template <class T, std::size_t kLanes>
using Vector = typename VectorOf<T, kLanes>::Type;

// The vectors of a group of lanes that are computed with numbers of type R.
template <class R>
struct Group {
    static constexpr std::size_t kLanes = kVectorNbytes / sizeof(R);
    using Reals = Vector<R, kLanes>;
    using Ints = Vector<std::conditional_t<sizeof(R) == 4, int32_t, int64_t>, kLanes>;
    using Unsigneds = Vector<std::conditional_t<sizeof(R) == 4, uint32_t, uint64_t>, kLanes>;
    using Words = Vector<uint32_t, kLanes>;
    using Steps = Vector<int32_t, kLanes>;
    using Halves = Vector<uint16_t, kLanes>;
};

using Floats = Group<float>::Reals;
using Words = Group<float>::Words;
using Halves = Group<float>::Halves;
using Doubles = Group<double>::Reals;

template <class V>
PACKHORSE_LOOP void load_vector(const uint8_t* src, V& vector) {
    std::memcpy(&vector, src, sizeof vector);
}

template <class V>
PACKHORSE_LOOP void store_vector(uint8_t* dst, const V& vector) {
    std::memcpy(dst, &vector, sizeof vector);
}

// Reads the elements of a group of lanes as numbers.
PACKHORSE_LOOP void read_elements(ElementF32, const uint8_t* src, Floats& x) {
    load_vector(src, x);
}
PACKHORSE_LOOP void read_elements(ElementF64, const uint8_t* src, Doubles& x) {
    load_vector(src, x);
}
PACKHORSE_LOOP void read_elements(ElementBF16, const uint8_t* src, Floats& x) {
    Halves bits;
    load_vector(src, bits);
    x = reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
}

// The values of F16 numbers, given as their bits.
PACKHORSE_LOOP void f16_values(const Words& half, Floats& x) {
    const Words magnitude = (half & 0x7FFF) << 13;
    const Words exponent = magnitude & 0x0F800000;
    Words bits = magnitude + (112u << 23);
    bits = exponent == 0x0F800000 ? bits + (112u << 23) : bits;
    // A subnormal becomes 2^-14 plus its value; the subtraction takes 2^-14 away.
    const Words lifted = bits + (1u << 23);
    const Floats small = reinterpret_cast<Floats>(lifted) - 0x1p-14f;
    bits = exponent == 0 ? reinterpret_cast<Words>(small) : bits;
    x = reinterpret_cast<Floats>(bits | (half & 0x8000) << 16);
}
PACKHORSE_LOOP void read_elements(ElementF16, const uint8_t* src, Floats& x) {
    Halves half;
    load_vector(src, half);
    f16_values(__builtin_convertvector(half, Words), x);
}

// Bits of the nearest BF16 and F16 numbers, ties to even; NaN does not occur.
PACKHORSE_LOOP void bf16_bits(const Floats& x, Words& bits) {
    const Words all = reinterpret_cast<Words>(x);
    bits = (all + 0x7FFF + (all >> 16 & 1)) >> 16;
}
PACKHORSE_LOOP void f16_bits(const Floats& x, Words& half) {
    const Words all = reinterpret_cast<Words>(x);
    const Words bits = all & 0x7FFFFFFF;
    // The spacing of F32 from 0.5 on is that of the smallest F16 numbers.
    const Floats raised = reinterpret_cast<Floats>(bits) + 0.5f;
    const Words small = reinterpret_cast<Words>(raised) - (126u << 23);
    const Words normal = (bits - (112u << 23) + 0xFFF + (bits >> 13 & 1)) >> 13;
    half = bits < (113u << 23) ? small : normal;
    half = bits >= (143u << 23) ? (half & 0) + 0x7C00 : half;
    half |= all >> 16 & 0x8000;
}

// Rounds numbers to values of the elements' type.
PACKHORSE_LOOP void round_values(ElementF32, Floats&) {}
PACKHORSE_LOOP void round_values(ElementF64, Doubles&) {}
PACKHORSE_LOOP void round_values(ElementBF16, Floats& x) {
    Words bits;
    bf16_bits(x, bits);
    x = reinterpret_cast<Floats>(bits << 16);
}
PACKHORSE_LOOP void round_values(ElementF16, Floats& x) {
    Words half;
    f16_bits(x, half);
    f16_values(half, x);
}

// Writes numbers as elements, rounded.
PACKHORSE_LOOP void write_elements(ElementF32, const Floats& x, uint8_t* dst) {
    store_vector(dst, x);
}
PACKHORSE_LOOP void write_elements(ElementF64, const Doubles& x, uint8_t* dst) {
    store_vector(dst, x);
}
PACKHORSE_LOOP void write_elements(ElementBF16, const Floats& x, uint8_t* dst) {
    Words bits;
    bf16_bits(x, bits);
    store_vector(dst, __builtin_convertvector(bits, Halves));
}
PACKHORSE_LOOP void write_elements(ElementF16, const Floats& x, uint8_t* dst) {
    Words half;
    f16_bits(x, half);
    store_vector(dst, __builtin_convertvector(half, Halves));
}

// Mixes counters to 32 random bits each: a bijection by xor-shifts and products (C. Wellons'
// "lowbias32", https://nullprogram.com/blog/2018/07/31/).
template <class W>
PACKHORSE_LOOP void mix(W& x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
}

// Encoding and decoding of vectors of elements of a type.
template <class Element>
struct Coder {
    using Real = typename Element::Real;
    using Lanes = Group<Real>;
    using Reals = typename Lanes::Reals;
    using Ints = typename Lanes::Ints;
    using Unsigneds = typename Lanes::Unsigneds;
    using Codes = typename Lanes::Words;

    static PACKHORSE_LOOP void round_to_steps(const Reals& x, Reals& steps) {
        steps = (x + Element::kMagic) - Element::kMagic;
    }

    // The values of numbers of steps.
    static PACKHORSE_LOOP void values_at(const Reals& steps, const Quantiser<Real>& by,
                                         Reals& values) {
        values = steps * by.step + by.center;
        round_values(Element{}, values);
    }

    static PACKHORSE_LOOP void absolute(const Reals& x, Reals& magnitude) {
        constexpr auto kMask = static_cast<typename Element::Unsigned>(-1) >> 1;
        magnitude = reinterpret_cast<Reals>(reinterpret_cast<Unsigneds>(x) & kMask);
    }

    // Sets lanes to all ones where `values` are within the bound of x; NaN is not. With kProves,
    // differences that are exact count up to the bound itself. A difference is exact if adding it
    // gives the one and subtracting it the other number: for the larger of the two, that operation
    // has no error of its own (Dekker 1971).
    template <bool kProves>
    static PACKHORSE_LOOP void check(const Reals& x, const Reals& values, const Quantiser<Real>& by,
                                     Ints& holds) {
        const Reals difference = x - values;
        Reals magnitude;
        absolute(difference, magnitude);
        if constexpr (kProves) {
            const Unsigneds errors = reinterpret_cast<Unsigneds>(x - difference - values) |
                                     reinterpret_cast<Unsigneds>(values + difference - x);
            const Reals most = errors == 0 ? by.outer - Reals{} : by.inner - Reals{};
            holds = magnitude <= most;
        } else {
            holds = magnitude <= by.inner;
        }
    }

    template <bool kProves>
    static PACKHORSE_LOOP void choose_nearest(const Reals& x, const Quantiser<Real>& by,
                                              Reals& steps, Ints& holds) {
        round_to_steps((x - by.center) * by.inverse, steps);
        Reals values, magnitude;
        values_at(steps, by, values);
        check<kProves>(x, values, by, holds);
        absolute(steps, magnitude);
        holds &= magnitude <= static_cast<Real>(by.most);
    }

    // Random numbers of 24 bits, at least 0 and below 1.
    static PACKHORSE_LOOP void random_shares(const Counter& counter, Reals& shares) {
        Codes random;
        for (uint32_t lane = 0; lane < Lanes::kLanes; ++lane) random[lane] = lane;
        random = (random + counter.index) ^ counter.key;
        mix(random);
        const auto whole = reinterpret_cast<typename Lanes::Steps>(random >> 8);
        shares = __builtin_convertvector(whole, Reals) * static_cast<Real>(0x1p-24);
    }

    // Takes the step below or above, with such probabilities that the mean is x. Whether an element
    // has a code does not depend on the random bits: otherwise escapes would bias the mean.
    template <bool kProves>
    static PACKHORSE_LOOP void choose_at_random(const Reals& x, const Quantiser<Real>& by,
                                                const Counter& counter, Reals& steps, Ints& holds) {
        const Reals scaled = (x - by.center) * by.inverse;
        round_to_steps(scaled, steps);
        steps = steps > scaled ? steps - 1 : steps;
        const Reals above = steps + 1;
        Reals low, high, shares;
        values_at(steps, by, low);
        values_at(above, by, high);
        Ints high_holds;
        check<kProves>(x, low, by, holds);
        check<kProves>(x, high, by, high_holds);
        const auto most = static_cast<Real>(by.most);
        const Reals gap = x - low;
        const Ints exceeds = gap > 0;
        holds &= (steps >= -most) & (steps <= most) & (((steps < most) & high_holds) | ~exceeds);
        random_shares(counter, shares);
        steps = (exceeds & (shares * (high - low) < gap)) ? above : steps;
    }

    // Codes; 0 for an escape.
    template <Rounding kRounding, bool kProves>
    static PACKHORSE_LOOP void encode(const Reals& x, const Quantiser<Real>& by,
                                      const Counter& counter, Codes& codes) {
        Reals steps;
        Ints holds;
        if constexpr (kRounding == Rounding::kNearest)
            choose_nearest<kProves>(x, by, steps, holds);
        else
            choose_at_random<kProves>(x, by, counter, steps, holds);
        // The code is in the low bits of the sum.
        const Reals sum = steps + (Element::kMagic + static_cast<Real>(zero_code(by.bits)));
        const Unsigneds all =
            reinterpret_cast<Unsigneds>(sum) & reinterpret_cast<Unsigneds>(holds) & 0xFFFF;
        codes = __builtin_convertvector(all, Codes);
    }

    // Values, which write_elements() rounds.
    static PACKHORSE_LOOP void decode(const Codes& codes, const Quantiser<Real>& by,
                                      Reals& values) {
        const auto steps = reinterpret_cast<typename Lanes::Steps>(codes - zero_code(by.bits));
        values = __builtin_convertvector(steps, Reals) * by.step + by.center;
    }
};

// Appends codes to a group of lanes. Words of a lane are a row of 16 words apart.
template <class Codes>
struct LaneWriter {
    uint8_t* dst;
    Codes pending{};
    uint32_t n_pending = 0;  // bits, below 32

    PACKHORSE_LOOP void put(const Codes& codes, uint32_t bits) {
        pending |= codes << n_pending;
        n_pending += bits;
        if (n_pending < 32) return;
        store_vector(dst, pending);
        dst += 4 * kBoundedLanes;
        n_pending -= 32;
        pending = n_pending > 0 ? codes >> (bits - n_pending) : codes ^ codes;
    }

    PACKHORSE_LOOP void finish() {
        if (n_pending > 0) store_vector(dst, pending);
    }
};

template <class Codes>
struct LaneReader {
    const uint8_t* src;
    Codes pending{};
    uint32_t n_pending = 0;

    PACKHORSE_LOOP void take(uint32_t bits, Codes& codes) {
        const uint32_t mask = (uint32_t{1} << bits) - 1;
        if (n_pending >= bits) {
            codes = pending & mask;
            pending >>= bits;
            n_pending -= bits;
            return;
        }
        Codes next;
        load_vector(src, next);
        src += 4 * kBoundedLanes;
        codes = (pending | next << n_pending) & mask;
        const uint32_t used = bits - n_pending;
        pending = used < 32 ? next >> used : next ^ next;
        n_pending = 32 - used;
    }
};

// Reads elements of which only the first `n` are there. The others read as NaN, which has no code.
template <class Element>
PACKHORSE_LOOP void read_some(const uint8_t* src, std::size_t n,
                              typename Coder<Element>::Reals& x) {
    alignas(64) uint8_t padded[Coder<Element>::Lanes::kLanes * Element::kNbytes];
    std::memset(padded, 0xFF, sizeof padded);
    std::memcpy(padded, src, n * Element::kNbytes);
    read_elements(Element{}, padded, x);
}

// Encodes a group of lanes, whose first is lane `first`, of a block of `n` elements.
template <class Element, Rounding kRounding, bool kProves>
PACKHORSE_LOOP void encode_group(const uint8_t* src, std::size_t n,
                                 const Quantiser<typename Element::Real>& by,
                                 const Counter& counter, std::size_t first, uint8_t* dst,
                                 PlainCodes& plain) {
    using Lanes = typename Coder<Element>::Lanes;
    LaneWriter<typename Lanes::Words> lanes{dst + 4 * first};
    typename Lanes::Reals x;
    typename Lanes::Words codes;
    for (std::size_t row = 0; row < n; row += kBoundedLanes) {
        const std::size_t at = row + first;
        const std::size_t there = at < n ? n - at : 0;
        const uint8_t* const elements = src + std::min(at, n) * Element::kNbytes;
        if (there >= Lanes::kLanes)
            read_elements(Element{}, elements, x);
        else
            read_some<Element>(elements, there, x);
        const Counter here{counter.key, counter.index + static_cast<uint32_t>(at)};
        Coder<Element>::template encode<kRounding, kProves>(x, by, here, codes);
        store_vector(reinterpret_cast<uint8_t*>(plain.codes + at), codes);
        lanes.put(codes, by.bits);
    }
    lanes.finish();
}

// Copies the elements without a code to `dst`, which has room for `n` elements. Returns how many
// there are.
template <class Element>
PACKHORSE_LOOP uint32_t collect_escapes(const uint8_t* src, std::size_t n, const PlainCodes& plain,
                                        uint8_t* dst) {
    uint32_t count = 0;
    for (std::size_t row = 0; row < n; row += kBoundedLanes) {
        uint32_t escapes = escapes_among(plain.codes + row);
        if (n - row < kBoundedLanes) escapes &= (1u << (n - row)) - 1;
        for (; escapes != 0; escapes &= escapes - 1, ++count) {
            const std::size_t at = row + static_cast<std::size_t>(__builtin_ctz(escapes));
            std::memcpy(dst + count * Element::kNbytes, src + at * Element::kNbytes,
                        Element::kNbytes);
        }
    }
    return count;
}

// Encodes all lanes of a block of `n` elements and collects its escapes. Returns their number.
template <class Element, Rounding kRounding, bool kProves>
PACKHORSE_LOOP uint32_t encode_block(const uint8_t* src, std::size_t n,
                                     const Quantiser<typename Element::Real>& by,
                                     const Counter& counter, uint8_t* codes, PlainCodes& plain,
                                     uint8_t* escapes) {
    for (std::size_t first = 0; first < kBoundedLanes; first += Coder<Element>::Lanes::kLanes)
        encode_group<Element, kRounding, kProves>(src, n, by, counter, first, codes, plain);
    return collect_escapes<Element>(src, n, plain, escapes);
}

template <class Element, Rounding kRounding>
PACKHORSE_LOOP_ENTRY std::size_t encode_blocks(BlocksToEncode blocks,
                                               const Quantiser<typename Element::Real>& by) {
    // The proof takes time, and hardly an element of 32 bits needs it: only blocks with escapes are
    // encoded again with it.
    constexpr bool kNeedsProof = Element::kNbytes == 2;
    PlainCodes plain;
    uint8_t escapes[kBoundedBlock * Element::kNbytes];
    std::size_t total = 0;
    for (std::size_t at = 0; at < blocks.n && total <= blocks.max_escapes; at += kBoundedBlock) {
        const std::size_t here = std::min(blocks.n - at, kBoundedBlock);
        const uint8_t* const elements = blocks.src + at * Element::kNbytes;
        uint32_t count = encode_block<Element, kRounding, kNeedsProof>(
            elements, here, by, blocks.counter, blocks.codes, plain, escapes);
        if constexpr (!kNeedsProof)
            if (count > 0)
                count = encode_block<Element, kRounding, true>(elements, here, by, blocks.counter,
                                                               blocks.codes, plain, escapes);
        if (count > 0)
            blocks.escapes->insert(blocks.escapes->end(), escapes,
                                   escapes + count * Element::kNbytes);
        *blocks.counts++ = static_cast<uint16_t>(count);
        total += count;
        blocks.codes += block_codes_nbytes(kBoundedBlock, by.bits);
        blocks.counter.index += kBoundedBlock;
    }
    return total;
}

// Decodes a group of lanes of a block of `n` elements.
template <class Element>
PACKHORSE_LOOP void decode_group(const uint8_t* src, std::size_t n,
                                 const Quantiser<typename Element::Real>& by, std::size_t first,
                                 uint8_t* dst, PlainCodes& plain) {
    using Lanes = typename Coder<Element>::Lanes;
    LaneReader<typename Lanes::Words> lanes{src + 4 * first};
    typename Lanes::Words codes;
    typename Lanes::Reals values;
    for (std::size_t row = 0; row < n; row += kBoundedLanes) {
        const std::size_t at = row + first;
        lanes.take(by.bits, codes);
        Coder<Element>::decode(codes, by, values);
        store_vector(reinterpret_cast<uint8_t*>(plain.codes + at), codes);
        if (at + Lanes::kLanes <= n) {
            write_elements(Element{}, values, dst + at * Element::kNbytes);
        } else if (at < n) {
            alignas(64) uint8_t padded[Lanes::kLanes * Element::kNbytes];
            write_elements(Element{}, values, padded);
            std::memcpy(dst + at * Element::kNbytes, padded, (n - at) * Element::kNbytes);
        }
    }
}

// Replaces elements whose code is 0 by the block's escapes. Returns whether there are exactly as
// many.
template <class Element>
PACKHORSE_LOOP bool patch_escapes(const PlainCodes& plain, std::size_t n, const uint8_t* escapes,
                                  uint32_t n_escapes, uint8_t* dst) {
    uint32_t used = 0;
    for (std::size_t row = 0; row < n; row += kBoundedLanes) {
        uint32_t missing = escapes_among(plain.codes + row);
        if (n - row < kBoundedLanes) missing &= (1u << (n - row)) - 1;
        for (; missing != 0; missing &= missing - 1, ++used) {
            if (used == n_escapes) return false;
            const std::size_t at = row + static_cast<std::size_t>(__builtin_ctz(missing));
            std::memcpy(dst + at * Element::kNbytes, escapes + used * Element::kNbytes,
                        Element::kNbytes);
        }
    }
    return used == n_escapes;
}

template <class Element>
PACKHORSE_LOOP_ENTRY bool decode_blocks(BlocksToDecode blocks,
                                        const Quantiser<typename Element::Real>& by) {
    PlainCodes plain;
    for (std::size_t at = 0; at < blocks.n; at += kBoundedBlock) {
        const std::size_t here = std::min(blocks.n - at, kBoundedBlock);
        uint8_t* const elements = blocks.dst + at * Element::kNbytes;
        for (std::size_t first = 0; first < kBoundedLanes; first += Coder<Element>::Lanes::kLanes)
            decode_group<Element>(blocks.codes, here, by, first, elements, plain);
        uint32_t count = 0;
        if (blocks.counts != nullptr) {
            count = load<uint16_t>(blocks.counts);
            blocks.counts += 2;
        }
        if (!patch_escapes<Element>(plain, here, blocks.escapes, count, elements)) return false;
        blocks.escapes += count * Element::kNbytes;
        blocks.codes += block_codes_nbytes(kBoundedBlock, by.bits);
    }
    return true;
}
