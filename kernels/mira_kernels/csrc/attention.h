// Causal attention of a few new queries over a long room of keys and values.
//
// Keys are taken in blocks of 256, counted from the first; each block's part of a query's
// sum is folded into it in order, so that a query's result does not know how many others
// came along or who computed which block.
#pragma once

#include <cmath>

#include "room.h"

namespace mira {

constexpr int64_t kBlockKeys = 256;

struct Attention {
  Kind kind;  // kDense or kFloat
  const void *keys, *values;
  int64_t key_strides[2], value_strides[2];  // over groups and over positions
  int64_t num_groups, group_heads, num_queries, num_cached;
  int64_t head_size, value_size;
  float scale;

  int64_t item_bytes() const { return kind == Kind::kDense ? 2 : 4; }
  int64_t num_rows() const { return group_heads * num_queries; }  // of one group
  int64_t num_visible(int64_t row) const { return num_cached + row % num_queries + 1; }
  // What is kept of a row: the largest score, the sum of weights, the weighted values.
  int64_t part_length() const { return 16 + value_length(); }
  int64_t value_length() const { return (value_size + 15) / 16 * 16; }
};

template <bool kIsFloat>
MIRA_INLINE F16 load_values(const void* p, int64_t at, int64_t count) {
  if constexpr (kIsFloat) {
    const float* from = static_cast<const float*>(p) + at;
    if (count >= 16) return load<F16>(from);
    F16 v{};
    std::memcpy(&v, from, 4 * count);
    return v;
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(p) + at;
    if (count >= 16) return widen(load<H16>(from));
    H16 v{};
    std::memcpy(&v, from, 2 * count);
    return widen(v);
  }
}

// kRows rows of weights `[rows, kBlockKeys]` times kWidth * 16 columns of the values.
template <bool kIsFloat, int kRows, int kWidth>
inline void weigh_tile(const Attention& a, const void* values, int64_t count, int64_t column,
                       const float* weights, float* out) {
  F16 sums[kRows][kWidth] = {};
  for (int64_t n = 0; n < count; ++n) {
    F16 v[kWidth];
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; ++i)
      v[i] = load_values<kIsFloat>(values, n * a.value_strides[1] + column + 16 * i,
                                   a.value_size - column - 16 * i);
#pragma GCC unroll 6
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int i = 0; i < kWidth; ++i) sums[m][i] += v[i] * weights[m * kBlockKeys + n];
  }
  for (int m = 0; m < kRows; ++m)
    for (int i = 0; i < kWidth; ++i)
      store(out + m * a.part_length() + 16 + column + 16 * i, sums[m][i]);
}

template <bool kIsFloat>
inline void weigh(const Attention& a, const void* values, int64_t count, int num_rows,
                  const float* weights, float* out) {
  for (int64_t column = 0; column < a.value_size;) {
    const bool is_wide = column + 64 <= a.value_size;
    by_rows<5>(num_rows, [&](auto rows, int m) {
      constexpr int kRows = decltype(rows)::value;
      const float* from = weights + m * kBlockKeys;
      float* to = out + m * a.part_length();
      if (is_wide) weigh_tile<kIsFloat, kRows, 4>(a, values, count, column, from, to);
      else weigh_tile<kIsFloat, kRows, 1>(a, values, count, column, from, to);
    });
    column += is_wide ? 64 : 16;
  }
}

// Turns one row's scores into weights, and writes their largest score and their sum.
inline void soften(float* scores, int64_t count, float scale, float* part) {
  F16 top = splat(-std::numeric_limits<float>::infinity());
  for (int64_t n = count; n < kBlockKeys; ++n) scores[n] = -std::numeric_limits<float>::infinity();
  for (int64_t n = 0; n < kBlockKeys; n += 16) {
    F16 s = load<F16>(scores + n) * scale;
    // A scale of 0 or below would turn what is not visible into something else.
    const I16 is_hidden = (__builtin_convertvector(I16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                                       13, 14, 15} + int32_t(n), I16)) >=
                          int32_t(count);
    s = is_hidden ? splat(-std::numeric_limits<float>::infinity()) : s;
    store(scores + n, s);
    top = top > s ? top : s;
  }
  float largest = top[0];
  for (int i = 1; i < 16; ++i) largest = std::max(largest, top[i]);
  F16 total{};
  for (int64_t n = 0; n < kBlockKeys; n += 16) {
    const F16 w = exponential(load<F16>(scores + n) - largest);
    store(scores + n, w);
    total += w;
  }
  part[0] = largest;
  part[1] = sum(total);
}

// Folds a block's part of one row into what was folded before.
inline void fold(const Attention& a, const float* part, float* into) {
  const float largest = std::max(into[0], part[0]);
  const float old = exponential(splat(into[0] - largest))[0];
  const float fresh = exponential(splat(part[0] - largest))[0];
  into[0] = largest;
  into[1] = into[1] * old + part[1] * fresh;
  for (int64_t i = 16; i < a.part_length(); i += 16)
    store(into + i, load<F16>(into + i) * old + load<F16>(part + i) * fresh);
}

// One block of keys for rows `first` to `first + num_rows` of a group; parts `[rows, ...]`.
// Rows that see nothing of the block get no part.
inline void attend_block(const Attention& a, int64_t group, int64_t block, int64_t first,
                         int num_rows, const void* const* queries, float* parts) {
  const int64_t start = block * kBlockKeys;
  int64_t count = 0;
  for (int m = 0; m < num_rows; ++m)
    count = std::max(count, std::min(kBlockKeys, a.num_visible(first + m) - start));
  if (count <= 0) return;
  const auto at = [&](const void* base, const int64_t* strides) {
    return static_cast<const char*>(base) +
           (group * strides[0] + start * strides[1]) * a.item_bytes();
  };
  Matrix keys{};
  keys.kind = a.kind;
  keys.codes = at(a.keys, a.key_strides);
  keys.num_outputs = count;
  keys.num_inputs = a.head_size;
  keys.row_stride = a.key_strides[1];
  alignas(64) float scores[kMaxRows * kBlockKeys];
  alignas(64) float product[kMaxRows * kMaxUnit];
  for (int64_t unit = 0; unit < keys.num_units(); ++unit) {
    const int64_t from = unit * keys.unit(), width = std::min(keys.unit(), count - from);
    multiply(keys, unit, queries, num_rows, product);
    for (int m = 0; m < num_rows; ++m)
      std::memcpy(scores + m * kBlockKeys + from, product + m * kMaxUnit, 4 * width);
  }
  for (int m = 0; m < num_rows; ++m) {
    const int64_t visible = std::min(kBlockKeys, a.num_visible(first + m) - start);
    if (visible > 0) soften(scores + m * kBlockKeys, visible, a.scale, parts + m * a.part_length());
    else std::memset(scores + m * kBlockKeys, 0, 4 * kBlockKeys);
  }
  const void* values = at(a.values, a.value_strides);
  if (a.kind == Kind::kFloat) weigh<true>(a, values, count, num_rows, scores, parts);
  else weigh<false>(a, values, count, num_rows, scores, parts);
}

// queries: prepared rows of all groups, `length` bytes apart. out: `[T, H, Dv]`.
inline void run_attention(const Attention& a, const char* queries, int64_t length, void* out) {
  thread_local Room rooms[2];
  const int64_t rows = a.num_rows(), part = a.part_length();
  const int64_t chunks = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t blocks = (a.num_cached + a.num_queries + kBlockKeys - 1) / kBlockKeys;
  // Blocks apart only where rows are few: their parts are kept until all are there.
  const int64_t spread = chunks == 1 ? blocks : 1;
  float* parts = rooms[0].take<float>(a.num_groups * chunks * spread * kMaxRows * part);
  float* totals = rooms[1].take<float>(a.num_groups * rows * part);
  const auto run = [&](int64_t group, int64_t chunk, int64_t block, float* to) {
    const int64_t first = chunk * kMaxRows;
    const int count = int(std::min<int64_t>(kMaxRows, rows - first));
    const void* row[kMaxRows];
    for (int m = 0; m < count; ++m) row[m] = queries + (group * rows + first + m) * length;
    attend_block(a, group, block, first, count, row, to);
  };
  const auto finish = [&](int64_t group, int64_t chunk, const auto& part_of) {
    for (int64_t row = chunk * kMaxRows; row < std::min(rows, (chunk + 1) * kMaxRows); ++row) {
      float* total = totals + (group * rows + row) * part;
      for (int64_t block = 0; block * kBlockKeys < a.num_visible(row); ++block) {
        const float* from = part_of(row % kMaxRows, block);
        if (block == 0) std::memcpy(total, from, 4 * part);
        else fold(a, from, total);
      }
    }
  };
  const auto write = [&](int64_t group, int64_t row) {
    float* total = totals + (group * rows + row) * part;
    const float sum_of_weights = total[1];
    for (int64_t i = 0; i < a.value_size; i += 16)
      store(total + 16 + i, load<F16>(total + 16 + i) / sum_of_weights);
    const int64_t head = group * a.group_heads + row / a.num_queries;
    const int64_t num_heads = a.num_groups * a.group_heads, t = row % a.num_queries;
    write_row(a.kind == Kind::kFloat, out, (t * num_heads + head) * a.value_size, total + 16,
              a.value_size);
  };
  if (spread > 1 || chunks == 1) {
    each(a.num_groups * blocks, 1, [&](int64_t task) {
      run(task / blocks, 0, task % blocks, parts + task * kMaxRows * part);
    });
    for (int64_t group = 0; group < a.num_groups; ++group) {
      finish(group, 0, [&](int64_t m, int64_t block) {
        return parts + ((group * blocks + block) * kMaxRows + m) * part;
      });
      for (int64_t row = 0; row < rows; ++row) write(group, row);
    }
    return;
  }
  each(a.num_groups * chunks, 1, [&](int64_t task) {
    const int64_t group = task / chunks, chunk = task % chunks, first = chunk * kMaxRows;
    const int64_t end = std::min(rows, first + kMaxRows);
    float* to = parts + task * kMaxRows * part;
    for (int64_t block = 0; block < blocks; ++block) {
      run(group, chunk, block, to);
      for (int64_t row = first; row < end; ++row) {
        if (block * kBlockKeys >= a.num_visible(row)) continue;
        float* total = totals + (group * rows + row) * part;
        if (block == 0) std::memcpy(total, to + (row - first) * part, 4 * part);
        else fold(a, to + (row - first) * part, total);
      }
    }
    for (int64_t row = first; row < end; ++row) write(group, row);
  });
}

}  // namespace mira
