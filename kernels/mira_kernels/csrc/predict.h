// Heads that tell which experts a later layer will need, for one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "room.h"

namespace mira {

inline float dot(const float* weights, const float* x, int64_t count) {
  F16 total{};
  int64_t c = 0;
  for (; c + 16 <= count; c += 16) total += load<F16>(weights + c) * load<F16>(x + c);
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += total[i];
  for (; c < count; ++c) sum += weights[c] * x[c];
  return sum;
}

// The act branch is weight `[E + 1, C]`, its last row the gate's, or `[E, C]` alone; the history
// branch a table row `[E + D + 1]` for each expert: logits, hidden units, gate.
struct Head {
  const float *weight, *bias, *table, *table_bias, *outer;
  int64_t num_experts, num_inputs, num_units;

  int64_t width() const { return num_experts + num_units + 1; }

  void shares(const float* x, const int64_t* chosen, int64_t k, float* out) const {
    const int64_t num_rows = weight == nullptr ? 0 : num_experts + (table != nullptr);
    std::vector<float> act(num_rows), selected(table != nullptr ? width() : 0);
    for (int64_t e = 0; e < num_rows; ++e)
      act[e] = bias[e] + dot(weight + e * num_inputs, x, num_inputs);
    if (table == nullptr) {
      std::copy_n(act.data(), num_experts, out);
    } else {
      std::copy_n(table_bias, width(), selected.data());
      for (int64_t j = 0; j < k; ++j)
        for (int64_t i = 0; i < width(); ++i) selected[i] += table[chosen[j] * width() + i];
      float* units = selected.data() + num_experts;
      for (int64_t d = 0; d < num_units; ++d) units[d] = std::max(units[d], 0.f);
      const float gate =
          num_rows ? 1 / (1 + std::exp(-(act[num_experts] + selected[width() - 1]))) : 0.f;
      for (int64_t e = 0; e < num_experts; ++e) {
        const float history = selected[e] + dot(outer + e * num_units, units, num_units);
        out[e] = num_rows ? history + gate * (act[e] - history) : history;
      }
    }
    const float most = *std::max_element(out, out + num_experts);
    float total = 0;
    for (int64_t e = 0; e < num_experts; ++e) total += out[e] = std::exp(out[e] - most);
    for (int64_t e = 0; e < num_experts; ++e) out[e] /= total;
  }
};

}  // namespace mira
