// Palette coding (docs/format.md, 6.3): codes of 1 to 4 bits as bit planes, a value outside of the palette as an escape.
//
// Bit planes are what SIMD compares produce and masked operations consume: 64 units are `code_bits` words of 64 bits. Escapes are few by choice of
// the encoder and are handled one by one.
#pragma once

#include <algorithm>
#include <bit>

#include "dispatch.hpp"
#include "histogram.hpp"
#include "layout.hpp"

namespace packhorse {

struct PaletteModel {
  uint32_t code_bits;
  bool has_escape;
  uint32_t n_values;
  uint8_t values[16];
};

constexpr std::size_t palette_planes_nbytes(uint32_t code_bits, std::size_t n) {
  return code_bits * 8 * ((n + 63) / 64);
}

// The cheapest palette for a histogram. Returns its estimated bits for the histogram's units.
inline uint64_t choose_palette(const Histogram& histogram, PaletteModel& model) {
  uint8_t order[256];
  uint32_t n_seen = 0;
  for (uint32_t v = 0; v < 256; ++v)
    if (histogram.counts[v] > 0) order[n_seen++] = static_cast<uint8_t>(v);
  std::sort(order, order + n_seen, [&](uint8_t a, uint8_t b) {
    const uint32_t count_a = histogram.counts[a], count_b = histogram.counts[b];
    return count_a != count_b ? count_a > count_b : a < b;
  });
  uint64_t best = ~uint64_t{0};
  for (uint32_t bits = 1; bits <= kMaxCodeBits; ++bits) {
    const bool escape = histogram.sampled || n_seen > 1u << bits;
    const uint32_t n_values = std::min(n_seen, (1u << bits) - (escape ? 1 : 0));
    uint64_t covered = 0;
    for (uint32_t i = 0; i < n_values; ++i) covered += histogram.counts[order[i]];
    const uint64_t cost = uint64_t{histogram.total} * bits + 8 * (histogram.total - covered);
    if (cost >= best) continue;
    best = cost;
    model.code_bits = bits;
    model.has_escape = escape;
    model.n_values = n_values;
    std::copy(order, order + n_values, model.values);
  }
  std::sort(model.values, model.values + model.n_values);
  return best;
}

// Bit planes of up to 64 units; `matched` has a bit for every unit in the palette.
PACKHORSE_INLINE uint64_t code_planes_portable(const uint8_t* src, std::size_t n,
                                               const PaletteModel& model, uint64_t* planes) {
  uint64_t matched = 0;
  for (std::size_t i = 0; i < n; ++i)
    for (uint32_t c = 0; c < model.n_values; ++c)
      if (src[i] == model.values[c]) {
        matched |= uint64_t{1} << i;
        for (uint32_t j = 0; j < model.code_bits; ++j) planes[j] |= uint64_t{c >> j & 1} << i;
        break;
      }
  return matched;
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline uint64_t equal_mask_avx2(const uint8_t* src, uint8_t value) {
  const __m256i wanted = _mm256_set1_epi8(static_cast<char>(value));
  uint64_t mask = 0;
  for (int h = 0; h < 2; ++h) {
    const __m256i units = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src) + h);
    const auto half = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(units, wanted)));
    mask |= uint64_t{half} << (32 * h);
  }
  return mask;
}

PACKHORSE_AVX512 inline uint64_t equal_mask_avx512(const uint8_t* src, uint8_t value) {
  return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(src),
                                _mm512_set1_epi8(static_cast<char>(value)));
}

// Sets the planes' bits for code c wherever `mask` says.
PACKHORSE_INLINE void add_code(uint64_t mask, uint32_t c, uint32_t code_bits, uint64_t* planes) {
  for (uint32_t j = 0; j < code_bits; ++j)
    if (c >> j & 1) planes[j] |= mask;
}

PACKHORSE_AVX2 inline uint64_t code_planes_avx2(const uint8_t* src, const PaletteModel& model,
                                                uint64_t* planes) {
  uint64_t matched = 0;
  for (uint32_t c = 0; c < model.n_values; ++c) {
    const uint64_t mask = equal_mask_avx2(src, model.values[c]);
    matched |= mask;
    add_code(mask, c, model.code_bits, planes);
  }
  return matched;
}

PACKHORSE_AVX512 inline uint64_t code_planes_avx512(const uint8_t* src, const PaletteModel& model,
                                                    uint64_t* planes) {
  uint64_t matched = 0;
  for (uint32_t c = 0; c < model.n_values; ++c) {
    const uint64_t mask = equal_mask_avx512(src, model.values[c]);
    matched |= mask;
    add_code(mask, c, model.code_bits, planes);
  }
  return matched;
}

#endif

inline uint64_t code_planes(const uint8_t* src, std::size_t n, const PaletteModel& model,
                            uint64_t* planes, Isa isa) {
#if PACKHORSE_X86
  if (isa == Isa::kAvx512 && n == 64) return code_planes_avx512(src, model, planes);
  if (isa == Isa::kAvx2 && n == 64) return code_planes_avx2(src, model, planes);
#endif
  (void)isa;
  return code_planes_portable(src, n, model, planes);
}

// Writes the stream of `n` units to `dst`, at most `capacity` bytes; returns its length, or 0 if it does not fit.
inline std::size_t palette_encode(const uint8_t* src, std::size_t n, const PaletteModel& model,
                                  uint8_t* dst, std::size_t capacity, Isa isa) {
  const std::size_t planes_nbytes = palette_planes_nbytes(model.code_bits, n);
  const std::size_t escapes_at = kPaletteHeaderNbytes + planes_nbytes;
  if (escapes_at > capacity) return 0;
  const std::size_t plane_stride = planes_nbytes / model.code_bits;
  std::size_t used = escapes_at;
  for (std::size_t at = 0; at < n; at += 64) {
    const std::size_t run = std::min<std::size_t>(64, n - at);
    uint64_t planes[kMaxCodeBits] = {};
    const uint64_t all = run == 64 ? ~uint64_t{0} : (uint64_t{1} << run) - 1;
    uint64_t escaped = ~code_planes(src + at, run, model, planes, isa) & all;
    for (uint32_t j = 0; j < model.code_bits; ++j)
      store(dst + kPaletteHeaderNbytes + j * plane_stride + at / 8, planes[j] | escaped);
    if (used + static_cast<std::size_t>(std::popcount(escaped)) > capacity) return 0;
    for (; escaped != 0; escaped &= escaped - 1) dst[used++] = src[at + static_cast<std::size_t>(std::countr_zero(escaped))];
  }
  std::memset(dst, 0, kPaletteHeaderNbytes);
  dst[0] = static_cast<uint8_t>(model.code_bits);
  dst[1] = model.has_escape;
  store(dst + 4, static_cast<uint32_t>(used - escapes_at));
  std::memcpy(dst + 8, model.values, model.n_values);
  return used;
}

struct alignas(64) PaletteDecoder {
  uint8_t values[16];
  uint32_t code_bits;
  bool has_escape;
  const uint8_t* planes;
  std::size_t plane_stride;
  const uint8_t* escapes;
  const uint8_t* escapes_end;
};

inline Status palette_open(const uint8_t* src, std::size_t nbytes, std::size_t n,
                           PaletteDecoder& out) {
  if (nbytes < kPaletteHeaderNbytes) return Status::kStreamLength;
  out.code_bits = src[0];
  if (out.code_bits < 1 || out.code_bits > kMaxCodeBits || src[1] > 1) return Status::kBadField;
  out.has_escape = src[1] != 0;
  if (load<uint16_t>(src + 2) != 0) return Status::kReserved;
  const std::size_t n_escapes = load<uint32_t>(src + 4);
  if (n_escapes > 0 && !out.has_escape) return Status::kEscapeCount;
  std::memcpy(out.values, src + 8, sizeof out.values);
  for (uint32_t c = (1u << out.code_bits) - (out.has_escape ? 1 : 0); c < 16; ++c)
    if (out.values[c] != 0) return Status::kReserved;
  const std::size_t planes_nbytes = palette_planes_nbytes(out.code_bits, n);
  if (nbytes != kPaletteHeaderNbytes + planes_nbytes + n_escapes) return Status::kStreamLength;
  out.planes = src + kPaletteHeaderNbytes;
  out.plane_stride = planes_nbytes / out.code_bits;
  out.escapes = out.planes + planes_nbytes;
  out.escapes_end = src + nbytes;
  return Status::kOk;
}

// Values of 64 units from their bit planes; an escape gets what its code finds in the palette.
PACKHORSE_INLINE void palette_values_portable(const uint64_t* planes, const PaletteDecoder& decoder,
                                              uint8_t* dst) {
  for (std::size_t i = 0; i < 64; ++i) {
    uint32_t code = 0;
    for (uint32_t j = 0; j < decoder.code_bits; ++j)
      code |= static_cast<uint32_t>(planes[j] >> i & 1) << j;
    dst[i] = decoder.values[code];
  }
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline void palette_values_avx2(const uint64_t* planes,
                                               const PaletteDecoder& decoder, uint8_t* dst) {
  const __m256i values = _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(decoder.values)));
  const __m256i byte_of_bit = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  for (int h = 0; h < 2; ++h) {
    __m256i code = _mm256_setzero_si256();
    for (uint32_t j = 0; j < decoder.code_bits; ++j) {
      const __m256i spread = _mm256_shuffle_epi8(
          _mm256_set1_epi32(static_cast<int>(planes[j] >> (32 * h))), byte_of_bit);
      const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
      code = _mm256_or_si256(
          code, _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(1 << j))));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst) + h, _mm256_shuffle_epi8(values, code));
  }
}

PACKHORSE_AVX512 inline void palette_values_avx512(const uint64_t* planes,
                                                   const PaletteDecoder& decoder, uint8_t* dst) {
  const __m512i values = _mm512_broadcast_i32x4(
      _mm_load_si128(reinterpret_cast<const __m128i*>(decoder.values)));
  __m512i code = _mm512_setzero_si512();
  for (uint32_t j = 0; j < decoder.code_bits; ++j)
    code = _mm512_mask_add_epi8(code, planes[j], code, _mm512_set1_epi8(static_cast<char>(1 << j)));
  _mm512_storeu_si512(dst, _mm512_shuffle_epi8(values, code));
}

#endif

inline void palette_values(const uint64_t* planes, const PaletteDecoder& decoder, uint8_t* dst,
                           Isa isa) {
#if PACKHORSE_X86
  if (isa == Isa::kAvx512) return palette_values_avx512(planes, decoder, dst);
  if (isa == Isa::kAvx2) return palette_values_avx2(planes, decoder, dst);
#endif
  (void)isa;
  palette_values_portable(planes, decoder, dst);
}

// The `n` units from `first` on; `first` is a multiple of 64, and so is `n` except at the end of the plane.
inline Status palette_decode(PaletteDecoder& decoder, std::size_t first, std::size_t n,
                             uint8_t* dst, Isa isa) {
  for (std::size_t at = 0; at < n; at += 64) {
    const std::size_t run = std::min<std::size_t>(64, n - at);
    uint64_t planes[kMaxCodeBits];
    uint64_t escaped = decoder.has_escape ? ~uint64_t{0} : 0;
    for (uint32_t j = 0; j < decoder.code_bits; ++j) {
      planes[j] = load<uint64_t>(decoder.planes + j * decoder.plane_stride + (first + at) / 8);
      escaped &= planes[j];
    }
    uint8_t tail[64];
    uint8_t* const block = run == 64 ? dst + at : tail;
    palette_values(planes, decoder, block, isa);
    if (run < 64) escaped &= (uint64_t{1} << run) - 1;
    if (decoder.escapes_end - decoder.escapes < std::popcount(escaped)) return Status::kEscapeCount;
    for (; escaped != 0; escaped &= escaped - 1) block[std::countr_zero(escaped)] = *decoder.escapes++;
    if (run < 64) std::memcpy(dst + at, tail, run);
  }
  return Status::kOk;
}

inline Status palette_close(const PaletteDecoder& decoder) {
  return decoder.escapes == decoder.escapes_end ? Status::kOk : Status::kEscapeCount;
}

}  // namespace packhorse
