// Vectors of sixteen floats, and pairs of bfloat16 values read from codes.
//
// Everything is written with the compiler's vector types, which any processor runs; where
// AVX-512 with bfloat16 products is there, the inner steps use its instructions instead.
// Both keep one fixed order of additions per output.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && \
    !defined(MIRA_PORTABLE)
#define MIRA_AVX512 1
#include <immintrin.h>
#endif

#define MIRA_INLINE inline __attribute__((always_inline))

namespace mira {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int16_t S16 __attribute__((vector_size(32)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint8_t B16 __attribute__((vector_size(16)));

template <class V>
MIRA_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
MIRA_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

MIRA_INLINE F16 splat(float v) { return F16{} + v; }

MIRA_INLINE float widen(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

MIRA_INLINE F16 widen(H16 v) { return (F16)(__builtin_convertvector(v, U16) << 16); }

// To the nearest bfloat16, ties to even; a NaN stays one.
MIRA_INLINE H16 narrow(F16 v) {
  const U16 bits = (U16)v;
  U16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U16 is_nan = (U16)(v != v);
  rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
  return __builtin_convertvector(rounded, H16);
}

MIRA_INLINE uint16_t narrow(float v) { return narrow(splat(v))[0]; }

// Always the same tree of additions.
MIRA_INLINE float sum(F16 v) {
  float a[16], b[8], c[4];
  std::memcpy(a, &v, sizeof a);
  for (int i = 0; i < 8; ++i) b[i] = a[i] + a[i + 8];
  for (int i = 0; i < 4; ++i) c[i] = b[i] + b[i + 4];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// The sums of four vectors, each by the tree of `sum`.
MIRA_INLINE void sum_four(const F16* v, float* out) {
#ifdef MIRA_AVX512
  __m128 q[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = (__m512)v[i];
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    q[i] = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  }
  _MM_TRANSPOSE4_PS(q[0], q[1], q[2], q[3]);
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(q[0], q[2]), _mm_add_ps(q[1], q[3])));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

// e ** v, within two units of the last place; 0 below -87.
MIRA_INLINE F16 exponential(F16 v) {
  const F16 low = splat(-87.3f), high = splat(88.3f);
  const I16 is_zero = v < low;
  v = v < low ? low : v;
  v = v > high ? high : v;
  const F16 shift = splat(12582912.f);  // rounds to a whole number: 1.5 * 2 ** 23
  const F16 whole = (v * 1.44269504f + shift) - shift;
  const F16 r = (v - whole * 0.693359375f) - whole * -2.12194440e-4f;
  F16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const I16 power = (__builtin_convertvector(whole, I16) + 127) << 23;
  const F16 y = p * (F16)power;
  return is_zero ? F16{} : y;
}

MIRA_INLINE uint32_t load_two(const uint16_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

#ifdef MIRA_AVX512

// 32 bfloat16 values, two a lane.
struct Pairs {
  __m512i bits;
};

MIRA_INLINE void dot(F16& sum, Pairs x, Pairs w) {
  sum = (F16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x.bits, (__m512bh)w.bits);
}

MIRA_INLINE Pairs load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }

MIRA_INLINE Pairs load_pairs(const uint16_t* p, int count) {
  return {_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), p)};
}

MIRA_INLINE Pairs spread_pair(const uint16_t* p) { return {_mm512_set1_epi32(load_two(p))}; }

struct CodeTables {
  alignas(64) uint8_t low[128];    // of the bfloat16 values of 0 to 127
  alignas(64) uint8_t high[128];
  alignas(64) uint16_t nibbles[32];  // bfloat16 values of -8 to 7, twice
  alignas(64) uint8_t words[2][2][64];  // by layout: the bytes that become words
  alignas(64) uint8_t joined[2][64];
  CodeTables() {
    for (int i = 0; i < 128; ++i) {
      const uint16_t v = narrow(float(i));
      low[i] = uint8_t(v), high[i] = uint8_t(v >> 8);
    }
    for (int i = 0; i < 32; ++i) nibbles[i] = narrow(float(i % 16 - 8));
    for (int layout = 0; layout < 2; ++layout) {
      // Where the bytes of two columns, twice sixteen rows of them, begin.
      const int even[2] = {0, layout ? 16 : 32}, odd[2] = {layout ? 32 : 16, 48};
      const int starts[2][2] = {{even[0], even[1]}, {odd[0], odd[1]}};
      for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 16; ++j)
          for (int column = 0; column < 2; ++column) {
            const uint8_t from = uint8_t(starts[half][column] + j);
            uint8_t* word = &words[layout][half][4 * j + 2 * column];
            word[0] = word[1] = from;
            joined[layout][16 * (j / 4) + 8 * half + 2 * (j % 4) + column] = from;
          }
    }
  }
};

inline const CodeTables tables;

// 64 codes, -127 to 127: `first` takes bytes 0 to 7 of every sixteen, `second` 8 to 15.
MIRA_INLINE void spread_codes(__m512i codes, Pairs& first, Pairs& second) {
  const __m512i size = _mm512_abs_epi8(codes);
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(tables.low), size,
                                               _mm512_load_si512(tables.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(tables.high), size,
                                          _mm512_load_si512(tables.high + 64));
  // high | (codes & 0x80)
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(int8_t(0x80)), 0xf8);
  first = {_mm512_unpacklo_epi8(low, high)};
  second = {_mm512_unpackhi_epi8(low, high)};
}

MIRA_INLINE void load_codes(const int8_t* p, Pairs& first, Pairs& second) {
  spread_codes(_mm512_loadu_si512(p), first, second);
}

MIRA_INLINE void load_codes(const int8_t* p, int count, Pairs& first, Pairs& second) {
  spread_codes(_mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, p), first, second);
}

// Where entry i of 64 inputs lies beside codes read by `load_codes`.
inline int code_position(int i) { return (i & 8 ? 32 : 0) + i / 16 * 8 + i % 8; }

// 64 bytes of packed INT4 rows. With 64 rows a block they are one pair of columns and w
// holds its rows by sixteens; with 32 rows two pairs, w[0] and w[1] of the first.
template <int kBlock>
MIRA_INLINE void load_nibbles(const uint8_t* p, Pairs* w) {
  const __m512i bytes = _mm512_loadu_si512(p), codes = _mm512_load_si512(tables.nibbles);
  for (int half = 0; half < 2; ++half) {
    const __m512i words =
        _mm512_permutexvar_epi8(_mm512_load_si512(tables.words[kBlock == 32][half]), bytes);
    const int at = kBlock == 64 ? half : 2 * half, other = kBlock == 64 ? half + 2 : at + 1;
    w[at] = {_mm512_permutexvar_epi16(words, codes)};
    w[other] = {_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), codes)};
  }
}

// The same for codes 16 * hi + lo, joined to one signed byte.
template <int kBlock>
MIRA_INLINE void load_joined(const uint8_t* hi, const uint8_t* lo, Pairs* w) {
  const __m512i order = _mm512_load_si512(tables.joined[kBlock == 32]);
  const __m512i a = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(hi));
  const __m512i b = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(lo));
  const __m512i upper = _mm512_set1_epi8(int8_t(0xf0)), offset = _mm512_set1_epi8(int8_t(136));
  // Takes the bits of `upper` from the first, the others from the second.
  const __m512i low = _mm512_ternarylogic_epi32(upper, _mm512_slli_epi16(a, 4), b, 0xca);
  const __m512i high = _mm512_ternarylogic_epi32(upper, a, _mm512_srli_epi16(b, 4), 0xca);
  const bool is_wide = kBlock == 64;
  spread_codes(_mm512_sub_epi8(low, offset), w[0], w[is_wide ? 1 : 2]);
  spread_codes(_mm512_sub_epi8(high, offset), w[is_wide ? 2 : 1], w[3]);
}

#else

struct Pairs {
  F16 even, odd;
};

MIRA_INLINE void dot(F16& sum, const Pairs& x, const Pairs& w) {
  sum += x.even * w.even;
  sum += x.odd * w.odd;
}

MIRA_INLINE Pairs pairs_of(U16 words) { return {(F16)(words << 16), (F16)(words & 0xffff0000u)}; }

MIRA_INLINE Pairs load_pairs(const uint16_t* p) { return pairs_of(load<U16>(p)); }

MIRA_INLINE Pairs load_pairs(const uint16_t* p, int count) {
  uint16_t padded[32] = {};
  std::memcpy(padded, p, 2 * count);
  return load_pairs(padded);
}

MIRA_INLINE Pairs spread_pair(const uint16_t* p) { return {splat(widen(p[0])), splat(widen(p[1]))}; }

MIRA_INLINE Pairs code_pairs(const int8_t* p) {
  const I16 words = __builtin_convertvector(load<S16>(p), I16);
  return {__builtin_convertvector((words << 24) >> 24, F16),
          __builtin_convertvector(words >> 8, F16)};
}

MIRA_INLINE void load_codes(const int8_t* p, Pairs& first, Pairs& second) {
  first = code_pairs(p);
  second = code_pairs(p + 32);
}

MIRA_INLINE void load_codes(const int8_t* p, int count, Pairs& first, Pairs& second) {
  int8_t padded[64] = {};
  std::memcpy(padded, p, count);
  load_codes(padded, first, second);
}

inline int code_position(int i) { return i; }

template <bool kJoined>
MIRA_INLINE F16 nibble_codes(const uint8_t* hi, const uint8_t* lo, int shift) {
  I16 codes = ((__builtin_convertvector(load<B16>(hi), I16) >> shift) & 15) - 8;
  if (kJoined)
    codes = 16 * codes + ((__builtin_convertvector(load<B16>(lo), I16) >> shift) & 15) - 8;
  return __builtin_convertvector(codes, F16);
}

template <int kBlock, bool kJoined>
MIRA_INLINE void load_packed(const uint8_t* hi, const uint8_t* lo, Pairs* w) {
  constexpr int kHalf = kBlock / 2;
  for (int i = 0; i < 4; ++i) {
    const int shift = kBlock == 64 ? i / 2 * 4 : i % 2 * 4;
    const int at = kBlock == 64 ? i % 2 * 16 : i / 2 * 32;
    w[i] = {nibble_codes<kJoined>(hi + at, lo + at, shift),
            nibble_codes<kJoined>(hi + at + kHalf, lo + at + kHalf, shift)};
  }
}

template <int kBlock>
MIRA_INLINE void load_nibbles(const uint8_t* p, Pairs* w) {
  load_packed<kBlock, false>(p, p, w);
}

template <int kBlock>
MIRA_INLINE void load_joined(const uint8_t* hi, const uint8_t* lo, Pairs* w) {
  load_packed<kBlock, true>(hi, lo, w);
}

#endif

}  // namespace mira
