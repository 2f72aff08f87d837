// The dtypes of frames, the C++ side of the table in docs/format.md, section 3.
// tests/codecs/test_layout.py compares it with src/packhorse/layout.py.
#pragma once

#include <array>
#include <bit>

#include "common/layout.hpp"

namespace packhorse {

constexpr uint32_t kWholeOnly = 1u << static_cast<int>(Split::kWhole);
constexpr uint32_t kIntegerSplits = kWholeOnly | 1u << static_cast<int>(Split::kBytes);
constexpr uint32_t kFloatSplits = kWholeOnly | 1u << static_cast<int>(Split::kFloat);

struct DTypeRow {
    uint32_t bits;  // of an element; 0: there is no dtype of this code
    uint32_t unit_nbytes;
    uint32_t splits;  // a bit for each split that is allowed

    constexpr bool allows(uint32_t split) const { return split < 8 && (splits >> split & 1) != 0; }
    constexpr bool is_float() const { return splits == kFloatSplits; }
    constexpr Split last_split() const { return static_cast<Split>(std::bit_width(splits) - 1); }
};

constexpr std::size_t kDTypeCodes = 27;  // one more than the largest code

// By code.
inline constexpr std::array<DTypeRow, kDTypeCodes> kDTypeRows = {{
    {},                       // 0
    {8, 1, kWholeOnly},       // BOOL
    {8, 1, kWholeOnly},       // U8
    {8, 1, kWholeOnly},       // I8
    {16, 2, kIntegerSplits},  // U16
    {16, 2, kIntegerSplits},  // I16
    {32, 4, kIntegerSplits},  // U32
    {32, 4, kIntegerSplits},  // I32
    {64, 8, kIntegerSplits},  // U64
    {64, 8, kIntegerSplits},  // I64
    {},
    {},
    {},
    {},                     // reserved for integers of other widths
    {16, 2, kFloatSplits},  // F16
    {16, 2, kFloatSplits},  // BF16
    {32, 4, kFloatSplits},  // F32
    {64, 8, kFloatSplits},  // F64
    {64, 4, kFloatSplits},  // C64
    {8, 1, kFloatSplits},   // F8_E4M3
    {8, 1, kFloatSplits},   // F8_E5M2
    {8, 1, kWholeOnly},     // F8_E8M0
    {8, 1, kFloatSplits},   // F8_E4M3FNUZ
    {8, 1, kFloatSplits},   // F8_E5M2FNUZ
    {4, 1, kWholeOnly},     // F4
    {6, 1, kWholeOnly},     // F6_E2M3
    {6, 1, kWholeOnly},     // F6_E3M2
}};

// The row of a code; null if there is none.
constexpr const DTypeRow* dtype_row(uint32_t code) {
    return code < kDTypeCodes && kDTypeRows[code].bits != 0 ? &kDTypeRows[code] : nullptr;
}

// Whether the base of a frame may have another dtype: F32 for a tensor of F16 or BF16.
constexpr bool is_allowed_base(uint32_t code, uint32_t base_code) {
    return base_code == code || (base_code == kF32Code && (code == kF16Code || code == kBF16Code));
}

}  // namespace packhorse
