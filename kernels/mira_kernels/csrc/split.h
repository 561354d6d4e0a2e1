// Bfloat16 weights from two planes of bytes. What the planes mean stands in split.py.
#pragma once

#include "vectors.h"

namespace mira {

// The draft reads every row as if its base were this, and multiplies sums by `draft_factor`.
constexpr int kDraftBase = 120;

// Rows of base 0 lie below 2 ** -119: to a draft they are zero.
inline float draft_factor(int base) {
  const uint32_t bits = base == 0 ? 0 : uint32_t(base - kDraftBase + 127) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// The bits of one row; low is null for a draft's.
inline void join_row(const uint8_t* high, const uint8_t* low, int base, int64_t count,
                     uint16_t* to) {
  if (low == nullptr) {
    const uint16_t offset = uint16_t(base << 7 | 4), kept = base == 0 ? 0 : 0xffff;
    for (int64_t k = 0; k < count; ++k)
      to[k] = kept & ((high[k] & 0x80) << 8 | ((high[k] & 0x7f) << 3) + offset);
    return;
  }
  for (int64_t k = 0; k < count; ++k) {
    const int below = low[k] >> 3, offset = below == 31 ? 0 : (base - below) << 7;
    to[k] = uint16_t((high[k] & 0x80) << 8 | (((high[k] & 0x7f) << 3 | (low[k] & 7)) + offset));
  }
}

// One row's way from 32 bytes of each plane to the pairs of a dense row.
template <bool kHasLow>
struct SplitRow;

#ifdef MIRA_AVX512

// Sign, three bits of exponent and four of mantissa at their places; garbage in bits 10 to 14.
MIRA_INLINE __m512i spread_high(const uint8_t* p) {
  return _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)), 3);
}

template <>
struct SplitRow<true> {
  __m512i offsets;  // of the exponent, by the low plane's upper five bits
  MIRA_INLINE void begin(int base) {
    alignas(64) static constexpr uint16_t kBelow[32] = {
        0, 128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920,
        2048, 2176, 2304, 2432, 2560, 2688, 2816, 2944, 3072, 3200, 3328, 3456, 3584, 3712, 3840,
        0};
    offsets = _mm512_maskz_sub_epi16(0x7fffffffu, _mm512_set1_epi16(int16_t(base << 7)),
                                     _mm512_load_si512(kBelow));
  }
  MIRA_INLINE Pairs read(const uint8_t* high, const uint8_t* low) const {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)low));
    const __m512i offset = _mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 3), offsets);
    // The mask's bits from the first, the others (three of mantissa) from the second. The mask
    // comes last because the first's register is overwritten.
    const __m512i bits = _mm512_ternarylogic_epi32(spread_high(high), wide,
                                                   _mm512_set1_epi16(int16_t(0x83f8)), 0xe4);
    return {_mm512_add_epi16(bits, offset)};
  }
};

template <>
struct SplitRow<false> {
  MIRA_INLINE void begin(int) {}
  MIRA_INLINE Pairs read(const uint8_t* high, const uint8_t*) const {
    // (high & mask) | base and the middle of what is missing
    return {_mm512_ternarylogic_epi32(spread_high(high), _mm512_set1_epi16(int16_t(0x83f8)),
                                      _mm512_set1_epi16(kDraftBase << 7 | 4), 0xea)};
  }
};

#else

// Bytes of even and of odd places, one a lane.
MIRA_INLINE void load_bytes(const uint8_t* p, U16* bytes) {
  const U16 words = __builtin_convertvector(load<H16>(p), U16);
  bytes[0] = words & 0xff;
  bytes[1] = words >> 8;
}

template <>
struct SplitRow<true> {
  uint32_t base;
  MIRA_INLINE void begin(int of) { base = uint32_t(of); }
  MIRA_INLINE Pairs read(const uint8_t* high, const uint8_t* low) const {
    U16 h[2], l[2];
    F16 values[2];
    load_bytes(high, h);
    load_bytes(low, l);
    for (int i = 0; i < 2; ++i) {
      const U16 below = l[i] >> 3, offset = ((base - below) << 7) & (U16)(below != 31);
      const U16 bits = ((h[i] & 0x7f) << 3 | (l[i] & 7)) + offset;
      values[i] = (F16)(bits << 16 | (h[i] & 0x80) << 24);
    }
    return {values[0], values[1]};
  }
};

template <>
struct SplitRow<false> {
  MIRA_INLINE void begin(int) {}
  MIRA_INLINE Pairs read(const uint8_t* high, const uint8_t*) const {
    U16 h[2];
    F16 values[2];
    load_bytes(high, h);
    for (int i = 0; i < 2; ++i)
      values[i] = (F16)((h[i] & 0x7f) << 19 | (h[i] & 0x80) << 24 |
                        uint32_t(kDraftBase << 7 | 4) << 16);
    return {values[0], values[1]};
  }
};

#endif

}  // namespace mira
