// Gated experts: one pass over all units of all experts for each of the two matrices.
#pragma once

#include <vector>

#include "room.h"

namespace mira {

// What all experts of a layer share.
struct ExpertShape {
  Kind kind;
  int64_t hidden, intermediate, group_size, block_rows;

  int64_t num_parts() const {
    switch (kind) {
      case Kind::kDense: return 2;
      case Kind::kInt8: return 3;
      case Kind::kInt4: return 4;
      default: return 6;
    }
  }

  // addresses: (up, down), (up, scale, down), (up, scales, down, scales) or
  // (up hi, scales, up lo, down hi, scales, down lo).
  Matrix matrix(const int64_t* addresses, bool is_down) const {
    const bool is_packed = kind == Kind::kInt4 || kind == Kind::kNested;
    const int64_t first = is_down ? (kind == Kind::kInt8 ? 2 : num_parts() / 2) : 0;
    const auto part = [&](int64_t i) { return reinterpret_cast<const void*>(addresses[first + i]); };
    Matrix m{};
    m.kind = kind;
    m.codes = part(0);
    if (is_packed) m.scales = static_cast<const uint16_t*>(part(1));
    if (kind == Kind::kNested) m.low = part(2);
    m.num_outputs = is_down ? hidden : 2 * intermediate;
    m.num_inputs = m.row_stride = is_down ? intermediate : hidden;
    m.group_size = group_size;
    m.block_rows = block_rows;
    return m;
  }
};

// Rows of one expert, at most kMaxRows; they begin at `first` in the sorted order.
struct Segment {
  const int64_t* addresses;
  int64_t first;
  int num_rows;
};

struct Routing {
  std::vector<Segment> segments;
  std::vector<int64_t> choices;  // t * k + j, sorted by expert, then by itself
};

// slot_of: expert -> row of addresses, or -1.
inline void route(const int64_t* index, int64_t num_choices, const std::vector<int32_t>& slot_of,
                  int64_t num_slots, const int64_t* addresses, int64_t num_parts, Routing& to) {
  std::vector<int64_t> starts(num_slots + 1, 0);
  const auto slot = [&](int64_t i) {
    return index[i] >= 0 && index[i] < int64_t(slot_of.size()) ? slot_of[index[i]] : -1;
  };
  for (int64_t i = 0; i < num_choices; ++i)
    if (slot(i) >= 0) ++starts[slot(i) + 1];
  for (int64_t s = 0; s < num_slots; ++s) starts[s + 1] += starts[s];
  to.choices.resize(starts[num_slots]);
  to.segments.clear();
  for (int64_t s = 0; s < num_slots; ++s)
    for (int64_t at = starts[s]; at < starts[s + 1]; at += kMaxRows)
      to.segments.push_back({addresses + s * num_parts, at,
                             int(std::min<int64_t>(kMaxRows, starts[s + 1] - at))});
  for (int64_t i = 0; i < num_choices; ++i)
    if (slot(i) >= 0) to.choices[starts[slot(i)]++] = i;
}

// silu(gate) * up, rounded after each as separate operations in bfloat16 would.
inline void gate_row(const ExpertShape& shape, const uint16_t* gate_up, const uint16_t* scale,
                     uint16_t* to) {
  const int64_t count = shape.intermediate, length = padded(count);
  std::memset(to + length - kPadding, 0, 2 * kPadding);
  uint16_t part[2][16] = {}, done[16];
  for (int64_t r = 0; r < count; r += 16) {
    const int64_t width = std::min<int64_t>(16, count - r);
    std::memcpy(part[0], gate_up + r, 2 * width);
    std::memcpy(part[1], gate_up + count + r, 2 * width);
    const F16 gate = widen(load<H16>(part[0])), up = widen(load<H16>(part[1]));
    // e ** v stops growing at 88.3; there the quotient is below any bfloat16 beside `up`.
    const F16 silu = widen(narrow(gate / (exponential(-gate) + 1.f)));
    F16 h = widen(narrow(silu * up));
    if (scale != nullptr) {
      std::memcpy(part[0], scale + r, 2 * width);
      h *= widen(load<H16>(part[0]));
    }
    store(done, narrow(h));
    if (shape.kind != Kind::kInt8) {
      std::memcpy(to + r, done, 2 * width);
    } else {
      for (int64_t i = 0; i < width; ++i) to[position(shape.kind, r + i)] = done[i];
    }
  }
}

struct ExpertRooms {
  Room inputs, gate_up, gated, rows;
  Routing routing;
};

inline ExpertRooms& expert_rooms() {
  thread_local ExpertRooms rooms;
  return rooms;
}

// Writes row `choice` of out for every routed choice; x is `[T, C]`, k choices a token.
inline void run_experts(const ExpertShape& shape, const Tensor& x, int64_t k, ExpertRooms& rooms,
                        void* out, int64_t out_stride, bool is_float) {
  const auto& [segments, choices] = rooms.routing;
  const int64_t num_tokens = x.size(0), hidden = shape.hidden, units = 2 * shape.intermediate;
  const int64_t x_length = padded(hidden), h_length = padded(shape.intermediate);
  uint16_t* inputs = rooms.inputs.take<uint16_t>(num_tokens * x_length);
  uint16_t* gate_up = rooms.gate_up.take<uint16_t>(choices.size() * units);
  uint16_t* gated = rooms.gated.take<uint16_t>(choices.size() * h_length);
  const uint16_t* from = static_cast<const uint16_t*>(x.const_data_ptr());
  for (int64_t t = 0; t < num_tokens; ++t)
    prepare_row(shape.kind, from + t * x.stride(0), x.stride(1), hidden, inputs + t * x_length);

  const Matrix any_up = shape.matrix(segments[0].addresses, false);
  const int64_t up_units = any_up.num_units();
  each(int64_t(segments.size()) * up_units, grain_of(any_up.unit_bytes()), [&](int64_t task) {
    const Segment& segment = segments[task / up_units];
    const Matrix up = shape.matrix(segment.addresses, false);
    const int64_t unit = task % up_units, first = unit * up.unit();
    const int64_t width = std::min(up.unit(), up.num_outputs - first);
    const void* row[kMaxRows];
    alignas(64) float product[kMaxRows * kMaxUnit];
    for (int m = 0; m < segment.num_rows; ++m)
      row[m] = inputs + choices[segment.first + m] / k * x_length;
    multiply(up, unit, row, segment.num_rows, product);
    const auto* scale = reinterpret_cast<const uint16_t*>(segment.addresses[1]);
    for (int m = 0; m < segment.num_rows; ++m) {
      float* at = product + m * kMaxUnit;
      if (shape.kind == Kind::kInt8)
        for (int64_t n = 0; n < width; ++n) at[n] *= widen(scale[(first + n) % shape.intermediate]);
      write_row(false, gate_up, (segment.first + m) * units + first, at, width);
    }
  });

  each(int64_t(segments.size()), 4, [&](int64_t s) {
    const auto* scale = shape.kind == Kind::kInt8
                            ? reinterpret_cast<const uint16_t*>(segments[s].addresses[1])
                            : nullptr;
    for (int64_t row = segments[s].first; row < segments[s].first + segments[s].num_rows; ++row)
      gate_row(shape, gate_up + row * units, scale, gated + row * h_length);
  });

  const Matrix any_down = shape.matrix(segments[0].addresses, true);
  const int64_t down_units = any_down.num_units();
  each(int64_t(segments.size()) * down_units, grain_of(any_down.unit_bytes()), [&](int64_t task) {
    const Segment& segment = segments[task / down_units];
    const Matrix down = shape.matrix(segment.addresses, true);
    const int64_t unit = task % down_units, first = unit * down.unit();
    const int64_t width = std::min(down.unit(), hidden - first);
    const void* row[kMaxRows];
    alignas(64) float product[kMaxRows * kMaxUnit];
    for (int m = 0; m < segment.num_rows; ++m) row[m] = gated + (segment.first + m) * h_length;
    multiply(down, unit, row, segment.num_rows, product);
    for (int m = 0; m < segment.num_rows; ++m)
      write_row(is_float, out, choices[segment.first + m] * out_stride + first,
                product + m * kMaxUnit, width);
  });
}

// One token's k rows, weighted, added in order and rounded once.
template <class Row, class Weight>
void combine_row(const Row* rows, int64_t row_stride, const Weight* weights, int64_t weight_stride,
                 int64_t k, int64_t hidden, uint16_t* to) {
  const auto wide = [](auto v) {
    if constexpr (sizeof v == 2) return widen(v);
    else return v;
  };
  for (int64_t c = 0; c < hidden; c += 16) {
    const int64_t width = std::min<int64_t>(16, hidden - c);
    F16 total{};
    for (int64_t j = 0; j < k; ++j) {
      const Row* at = rows + j * row_stride + c;
      float lanes[16] = {};
      for (int64_t i = 0; i < width; ++i) lanes[i] = wide(at[i]);
      total += load<F16>(lanes) * wide(weights[j * weight_stride]);
    }
    const H16 rounded = narrow(total);
    std::memcpy(to + c, &rounded, 2 * width);
  }
}

inline void combine(const void* rows, bool is_float, int64_t row_stride, const Tensor& weights,
                    int64_t hidden, uint16_t* to) {
  const int64_t k = weights.size(1), step = weights.stride(0), inner = weights.stride(1);
  const bool has_bfloat16_weights = is_bfloat16(weights);
  for (int64_t t = 0; t < weights.size(0); ++t) {
    const auto run = [&](auto* row, auto* weight) {
      combine_row(row + t * k * row_stride, row_stride, weight + t * step, inner, k, hidden,
                  to + t * hidden);
    };
    const auto with = [&](auto* weight) {
      if (is_float) run(static_cast<const float*>(rows), weight);
      else run(static_cast<const uint16_t*>(rows), weight);
    };
    if (has_bfloat16_weights) with(static_cast<const uint16_t*>(weights.const_data_ptr()));
    else with(static_cast<const float*>(weights.const_data_ptr()));
  }
}

}  // namespace mira
