// Products of a few rows with one block of a matrix's outputs.
//
// A matrix is `[N, K]`. Work is cut by outputs only: each output of each row is summed over
// K in one fixed order, whatever the number of rows and threads.
#pragma once

#include <algorithm>

#include "split.h"
#include "vectors.h"

namespace mira {

constexpr int kMaxRows = 48;
constexpr int kMaxUnit = 64;  // most outputs of a block
constexpr int kPadding = 64;  // entries that a prepared row is a multiple of, zero-filled

enum class Kind : int64_t { kDense = 0, kInt8 = 1, kInt4 = 2, kNested = 3, kFloat = 4, kSplit = 5,
                           kDraft = 6 };

struct Matrix {
  Kind kind;
  const void* codes;     // values, codes or the high plane
  const void* low;       // the low plane of `kNested` and `kSplit`
  const int16_t* bases;  // of the rows of `kSplit` and `kDraft`
  const uint16_t* scales;  // of packed codes: [K / group, N, 2]
  int64_t num_outputs, num_inputs;
  int64_t row_stride;  // entries, of kinds that are not packed
  int64_t group_size, block_rows;

  bool is_packed() const { return kind == Kind::kInt4 || kind == Kind::kNested; }
  int64_t unit() const { return is_packed() ? block_rows : 32; }
  int64_t num_units() const { return (num_outputs + unit() - 1) / unit(); }
  int64_t unit_bytes() const {
    const int64_t entries = unit() * num_inputs;
    switch (kind) {
      case Kind::kDense:
      case Kind::kSplit: return 2 * entries;
      case Kind::kFloat: return 4 * entries;
      case Kind::kInt4: return entries / 2;
      default: return entries;
    }
  }
};

// How rows of a kind are read: `kStep` inputs at once.
struct DenseRows {
  using Weight = uint16_t;
  using Input = uint16_t;
  static constexpr int kStep = 32;
  Pairs lanes;
  MIRA_INLINE void read(const Weight* p) { lanes = load_pairs(p); }
  MIRA_INLINE void read(const Weight* p, int count) { lanes = load_pairs(p, count); }
  MIRA_INLINE void add(F16& sum, const Input* x) const { dot(sum, load_pairs(x), lanes); }
};

struct Int8Rows {
  using Weight = int8_t;
  using Input = uint16_t;
  static constexpr int kStep = 64;
  Pairs first, second;
  MIRA_INLINE void read(const Weight* p) { load_codes(p, first, second); }
  MIRA_INLINE void read(const Weight* p, int count) { load_codes(p, count, first, second); }
  MIRA_INLINE void add(F16& sum, const Input* x) const {
    dot(sum, load_pairs(x), first);
    dot(sum, load_pairs(x + 32), second);
  }
};

struct FloatRows {
  using Weight = float;
  using Input = float;
  static constexpr int kStep = 16;
  F16 lanes;
  MIRA_INLINE void read(const Weight* p) { lanes = load<F16>(p); }
  MIRA_INLINE void read(const Weight* p, int count) {
    lanes = F16{};
    std::memcpy(&lanes, p, 4 * count);
  }
  MIRA_INLINE void add(F16& sum, const Input* x) const { sum += load<F16>(x) * lanes; }
};

// Asks for what the next tile of four rows will read, in the order of memory: four streams of
// single lines reach half of the memory rate (EPYC, Zen 4, 2026-11-30: 14 of 28 GB/s), one
// long stream reaches it. Past a few rows the products take longer than the memory.
template <int kRows, class Weight>
MIRA_INLINE void fetch_ahead(const Weight* p, int64_t tile) {
  if (kRows <= 2) {
    __builtin_prefetch(p + tile);
    __builtin_prefetch(reinterpret_cast<const char*>(p + tile) + 16384, 0, 2);
  } else if (tile * int64_t(sizeof(Weight)) < 4096) {
    __builtin_prefetch(p + tile);
  } else {
    __builtin_prefetch(p + 2 * tile, 0, 2);
  }
}

// kRows inputs times four rows of weights. out is `[kRows, kMaxUnit]`.
template <class Rows, int kRows>
inline void dot_tile(const Matrix& matrix, int64_t first, const void* const* x, float* out) {
  using Weight = typename Rows::Weight;
  const int64_t num_inputs = matrix.num_inputs, stride = matrix.row_stride;
  const Weight* w[4];
  const typename Rows::Input* rows[kRows];
  for (int n = 0; n < 4; ++n)
    w[n] = static_cast<const Weight*>(matrix.codes) +
           std::min(first + n, matrix.num_outputs - 1) * stride;
  for (int m = 0; m < kRows; ++m) rows[m] = static_cast<const typename Rows::Input*>(x[m]);
  F16 sums[kRows][4] = {};
  Rows lanes[4];
  const auto add = [&](int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) lanes[n].add(sums[m][n], rows[m] + k);
  };
  int64_t k = 0;
  for (; k + Rows::kStep <= num_inputs; k += Rows::kStep) {
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      fetch_ahead<kRows>(w[0] + 4 * k + n * Rows::kStep, 4 * stride);
      lanes[n].read(w[n] + k);
    }
    add(k);
  }
  if (k < num_inputs) {
    for (int n = 0; n < 4; ++n) lanes[n].read(w[n] + k, int(num_inputs - k));
    add(k);
  }
  for (int m = 0; m < kRows; ++m) sum_four(sums[m], out + m * kMaxUnit);
}

// The same for rows in two planes, or for the draft's in one: steps, products and additions
// are those of dense rows, so that equal weights give equal bits.
template <bool kHasLow, int kRows>
inline void split_tile(const Matrix& matrix, int64_t first, const void* const* x, float* out) {
  constexpr int kStep = DenseRows::kStep;
  const int64_t num_inputs = matrix.num_inputs;
  const uint8_t* high = static_cast<const uint8_t*>(matrix.codes) + first * num_inputs;
  const uint8_t* low =
      kHasLow ? static_cast<const uint8_t*>(matrix.low) + first * num_inputs : high;
  int64_t at[4];  // of a row in both planes: pointers to eight rows would not stay in registers
  const uint16_t* rows[kRows];
  // Five rows of 576 inputs: a tenth less time when fetched as for one row; the draft's single
  // plane takes a fifth more then (EPYC, Zen 4, 2026-11-30).
  const bool is_short = 4 * num_inputs < 4096;
  SplitRow<kHasLow> readers[4];
  float factors[4];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const int64_t row = std::min(first + n, matrix.num_outputs - 1);
    at[n] = (row - first) * num_inputs;
    readers[n].begin(matrix.bases[row]);
    factors[n] = draft_factor(matrix.bases[row]);
  }
  for (int m = 0; m < kRows; ++m) rows[m] = static_cast<const uint16_t*>(x[m]);
  F16 sums[kRows][4] = {};
  Pairs lanes[4];
  const auto add = [&](int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) dot(sums[m][n], load_pairs(rows[m] + k), lanes[n]);
  };
  int64_t k = 0;
  for (; k + kStep <= num_inputs; k += kStep) {
#pragma GCC unroll 2
    for (int line = 0; line < 4 * kStep; line += 64) {
      if (kHasLow && is_short) {
        fetch_ahead<1>(high + 4 * k + line, 4 * num_inputs);
        fetch_ahead<1>(low + 4 * k + line, 4 * num_inputs);
      } else {
        fetch_ahead<kRows>(high + 4 * k + line, 4 * num_inputs);
        if (kHasLow) fetch_ahead<kRows>(low + 4 * k + line, 4 * num_inputs);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) lanes[n] = readers[n].read(high + k + at[n], low + k + at[n]);
    add(k);
  }
  if (k < num_inputs) {
    // What the zeros are read as meets the zeros behind a prepared row.
    uint8_t rest[2][kStep] = {};
    for (int n = 0; n < 4; ++n) {
      std::memcpy(rest[0], high + k + at[n], num_inputs - k);
      std::memcpy(rest[1], low + k + at[n], num_inputs - k);
      lanes[n] = readers[n].read(rest[0], rest[1]);
    }
    add(k);
  }
  for (int m = 0; m < kRows; ++m) {
    float* to = out + m * kMaxUnit;
    sum_four(sums[m], to);
    if (!kHasLow)
      for (int n = 0; n < 4; ++n) to[n] *= factors[n];
  }
}

// kRows inputs times one block of packed rows. out is `[kRows, kMaxUnit]`.
template <int kBlock, bool kNested, int kRows>
inline void packed_tile(const Matrix& matrix, int64_t unit, const void* const* x, float* out) {
  constexpr int kSums = kBlock / 16, kPairs = 4 / kSums;
  constexpr int kAhead = 2048;
  const int64_t offset = unit * kBlock * matrix.num_inputs / 2;
  const uint8_t* hi = static_cast<const uint8_t*>(matrix.codes) + offset;
  const uint8_t* lo = kNested ? static_cast<const uint8_t*>(matrix.low) + offset : hi;
  const uint16_t* scales = matrix.scales + unit * kBlock * 2;
  const uint16_t* rows[kRows];
  for (int m = 0; m < kRows; ++m) rows[m] = static_cast<const uint16_t*>(x[m]);
  for (int m = 0; m < kRows; ++m) std::memset(out + m * kMaxUnit, 0, 4 * kBlock);
  for (int64_t k = 0; k < matrix.num_inputs;) {
    F16 sums[kRows][kSums] = {};
    for (const int64_t end = k + matrix.group_size; k < end; k += 2 * kPairs) {
      Pairs w[4];
      __builtin_prefetch(hi + kAhead);
      if (kNested) {
        __builtin_prefetch(lo + kAhead);
        load_joined<kBlock>(hi, lo, w);
      } else {
        load_nibbles<kBlock>(hi, w);
      }
      hi += 64, lo += 64;
#pragma GCC unroll 6
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int p = 0; p < kPairs; ++p) {
          const Pairs pair = spread_pair(rows[m] + k + 2 * p);
#pragma GCC unroll 4
          for (int n = 0; n < kSums; ++n) dot(sums[m][n], pair, w[p * kSums + n]);
        }
    }
    for (int n = 0; n < kSums; ++n) {
      F16 scale = (F16)(load<U16>(scales + 32 * n) << 16);
      if (kNested) scale *= 0.0625f;
      for (int m = 0; m < kRows; ++m) {
        float* at = out + m * kMaxUnit + 16 * n;
        store(at, load<F16>(at) + sums[m][n] * scale);
      }
    }
    scales += 2 * matrix.num_outputs;
  }
}

// Calls tile(rows as a constant, first row) until all rows are done.
template <int kMost, class Tile>
MIRA_INLINE void by_rows(int num_rows, const Tile& tile) {
  int row = 0;
  for (; row + kMost <= num_rows; row += kMost) tile(std::integral_constant<int, kMost>{}, row);
  switch (num_rows - row) {
    case 1: return tile(std::integral_constant<int, 1>{}, row);
    case 2: return tile(std::integral_constant<int, 2>{}, row);
    case 3: return tile(std::integral_constant<int, 3>{}, row);
    case 4: return tile(std::integral_constant<int, 4>{}, row);
    case 5:
      if constexpr (kMost > 5) return tile(std::integral_constant<int, 5>{}, row);
  }
}

template <class Rows>
inline void dot_unit(const Matrix& matrix, int64_t unit, const void* const* x, int num_rows,
                     float* out) {
  const int64_t first = unit * matrix.unit();
  const int64_t end = std::min(first + matrix.unit(), matrix.num_outputs);
  for (int64_t n = first; n < end; n += 4)
    by_rows<6>(num_rows, [&](auto rows, int m) {
      dot_tile<Rows, decltype(rows)::value>(matrix, n, x + m, out + m * kMaxUnit + n - first);
    });
}

template <bool kHasLow>
inline void split_unit(const Matrix& matrix, int64_t unit, const void* const* x, int num_rows,
                       float* out) {
  const int64_t first = unit * matrix.unit();
  const int64_t end = std::min(first + matrix.unit(), matrix.num_outputs);
  for (int64_t n = first; n < end; n += 4)
    by_rows<6>(num_rows, [&](auto rows, int m) {
      split_tile<kHasLow, decltype(rows)::value>(matrix, n, x + m, out + m * kMaxUnit + n - first);
    });
}

template <int kBlock, bool kNested>
inline void packed_unit(const Matrix& matrix, int64_t unit, const void* const* x, int num_rows,
                        float* out) {
  by_rows<5>(num_rows, [&](auto rows, int m) {
    packed_tile<kBlock, kNested, decltype(rows)::value>(matrix, unit, x + m, out + m * kMaxUnit);
  });
}

// Prepared rows x (at most kMaxRows) times one unit of outputs, to out `[rows, kMaxUnit]`.
inline void multiply(const Matrix& matrix, int64_t unit, const void* const* x, int num_rows,
                     float* out) {
  const bool is_wide = matrix.block_rows == 64;
  switch (matrix.kind) {
    case Kind::kDense: return dot_unit<DenseRows>(matrix, unit, x, num_rows, out);
    case Kind::kInt8: return dot_unit<Int8Rows>(matrix, unit, x, num_rows, out);
    case Kind::kFloat: return dot_unit<FloatRows>(matrix, unit, x, num_rows, out);
    case Kind::kSplit: return split_unit<true>(matrix, unit, x, num_rows, out);
    case Kind::kDraft: return split_unit<false>(matrix, unit, x, num_rows, out);
    case Kind::kInt4:
      return is_wide ? packed_unit<64, false>(matrix, unit, x, num_rows, out)
                     : packed_unit<32, false>(matrix, unit, x, num_rows, out);
    case Kind::kNested:
      return is_wide ? packed_unit<64, true>(matrix, unit, x, num_rows, out)
                     : packed_unit<32, true>(matrix, unit, x, num_rows, out);
  }
}

inline int64_t padded(int64_t num_inputs) { return (num_inputs + kPadding - 1) / kPadding * kPadding; }

// Where input k of a prepared row lies.
MIRA_INLINE int64_t position(Kind kind, int64_t k) {
  return kind == Kind::kInt8 ? k / 64 * 64 + code_position(int(k % 64)) : k;
}

// Writes one bfloat16 row, `stride` entries apart, in the order that `kind` reads.
inline void prepare_row(Kind kind, const uint16_t* from, int64_t stride, int64_t num_inputs,
                        uint16_t* to) {
  const int64_t length = padded(num_inputs);
  std::memset(to + length - kPadding, 0, 2 * kPadding);
  if (kind != Kind::kInt8 && stride == 1) {
    std::memcpy(to, from, 2 * num_inputs);
  } else if (kind != Kind::kInt8) {
    for (int64_t k = 0; k < num_inputs; ++k) to[k] = from[k * stride];
  } else {
    for (int64_t k = 0; k < num_inputs; ++k) to[position(kind, k)] = from[k * stride];
  }
}

}  // namespace mira
