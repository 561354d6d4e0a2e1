// The operators of namespace `mira`: arguments checked, rows prepared, work handed to torch's
// threads. Built against torch's stable interface, so that no other header of torch is read.

#include "attention.h"
#include "experts.h"
#include "predict.h"

namespace mira {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;

Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  return torch::stable::new_empty(like, IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), type);
}

Tensor aten_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

struct BiasView {
  explicit BiasView(const std::optional<Tensor>& bias, int64_t num_outputs) {
    if (!bias.has_value()) return;
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == num_outputs, "bias must be [N]");
    is_float = bias->scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(is_float || is_bfloat16(*bias), "bias must be bfloat16 or float32");
    data = bias->const_data_ptr();
    stride = bias->stride(0);
  }
  float at(int64_t n) const {
    return is_float ? static_cast<const float*>(data)[n * stride]
                    : widen(static_cast<const uint16_t*>(data)[n * stride]);
  }
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_float = false;
};

// Weights that planes do not hold, sorted by row and column.
struct Exceptions {
  Exceptions() = default;
  Exceptions(const Tensor& at, const Tensor& of, int64_t num_outputs, int64_t num_inputs) {
    check_cpu(at, ScalarType::Int, "exceptions");
    check_cpu(of, ScalarType::Float, "exception_values");
    count = of.numel();
    STD_TORCH_CHECK(at.is_contiguous() && of.is_contiguous() && at.dim() == 2 &&
                        at.size(0) == count && at.size(1) == 2 && of.dim() == 1,
                    "exceptions must be [m, 2] and their values [m], contiguous");
    places = static_cast<const int32_t*>(at.const_data_ptr());
    values = static_cast<const float*>(of.const_data_ptr());
    for (int64_t i = 0; i < count; ++i)
      STD_TORCH_CHECK(places[2 * i] >= (i == 0 ? 0 : places[2 * i - 2]) &&
                          places[2 * i] < num_outputs && places[2 * i + 1] >= 0 &&
                          places[2 * i + 1] < num_inputs,
                      "exceptions must be sorted and lie in the matrix");
  }
  // Calls body(row, column, value) for those of rows `first` to `end`.
  template <class Body>
  void each_of(int64_t first, int64_t end, const Body& body) const {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (places[2 * middle] < first) low = middle + 1;
      else high = middle;
    }
    for (; low < count && places[2 * low] < end; ++low)
      body(places[2 * low], places[2 * low + 1], values[low]);
  }
  const int32_t* places = nullptr;
  const float* values = nullptr;
  int64_t count = 0;
};

// x `[..., K]` in any strides times a matrix; scales are of outputs.
Tensor matrix_product(const Tensor& x, const Matrix& matrix, const float* scales,
                      const BiasView& bias, const Exceptions& exceptions = {}) {
  thread_local Room room;
  const int64_t num_inputs = matrix.num_inputs, num_outputs = matrix.num_outputs;
  const int64_t num_rows = x.numel() / std::max<int64_t>(num_inputs, 1);
  const Tensor flat = x.dim() == 2 ? x : torch::stable::reshape(x, {num_rows, num_inputs});
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = num_outputs;
  Tensor out = new_empty(x, sizes, ScalarType::BFloat16);
  if (num_rows == 0 || num_outputs == 0) return out;
  const int64_t length = padded(num_inputs);
  uint16_t* inputs = room.take<uint16_t>(num_rows * length);
  const auto* from = static_cast<const uint16_t*>(flat.const_data_ptr());
  for (int64_t m = 0; m < num_rows; ++m)
    prepare_row(matrix.kind, from + m * flat.stride(0), flat.stride(1), num_inputs,
                inputs + m * length);
  void* to = out.mutable_data_ptr();
  each(matrix.num_units(), grain_of(matrix.unit_bytes()), [&](int64_t unit) {
    alignas(64) float product[kMaxRows * kMaxUnit];
    const void* rows[kMaxRows];
    const int64_t first = unit * matrix.unit();
    const int64_t width = std::min(matrix.unit(), num_outputs - first);
    for (int64_t begin = 0; begin < num_rows; begin += kMaxRows) {
      const int count = int(std::min<int64_t>(kMaxRows, num_rows - begin));
      for (int m = 0; m < count; ++m) rows[m] = inputs + (begin + m) * length;
      multiply(matrix, unit, rows, count, product);
      exceptions.each_of(first, first + width, [&](int64_t n, int64_t k, float value) {
        for (int m = 0; m < count; ++m)
          product[m * kMaxUnit + n - first] +=
              widen(static_cast<const uint16_t*>(rows[m])[k]) * value;
      });
      for (int m = 0; m < count; ++m) {
        float* at = product + m * kMaxUnit;
        if (scales != nullptr)
          for (int64_t n = 0; n < width; ++n) at[n] *= scales[first + n];
        if (bias.data != nullptr)
          for (int64_t n = 0; n < width; ++n) at[n] += bias.at(first + n);
        write_row(false, to, (begin + m) * num_outputs + first, at, width);
      }
    }
  });
  return out;
}

void check_rows(const Tensor& x, int64_t num_inputs) {
  check_cpu(x, ScalarType::BFloat16, "x");
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == num_inputs && num_inputs > 0,
                  "x must be [..., K] with the weight's K");
}

Matrix row_matrix(Kind kind, const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be [N, K], contiguous");
  Matrix m{};
  m.kind = kind;
  m.codes = weight.const_data_ptr();
  m.num_outputs = weight.size(0);
  m.num_inputs = m.row_stride = weight.size(1);
  return m;
}

Tensor dense_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_cpu(weight, ScalarType::BFloat16, "weight");
  const Matrix matrix = row_matrix(Kind::kDense, weight);
  check_rows(x, matrix.num_inputs);
  if (x.numel() > kMaxRows * matrix.num_inputs) {
    if (!bias.has_value() || is_bfloat16(*bias)) return aten_linear(x, weight, bias);
    return aten_linear(x, weight, torch::stable::to(*bias, ScalarType::BFloat16));
  }
  return matrix_product(x, matrix, nullptr, BiasView(bias, matrix.num_outputs));
}

// Many rows: codes to bfloat16, a chunk of outputs at a time, and torch's product.
Tensor int8_chunks(const Tensor& x, const Tensor& codes, const float* scales,
                   const BiasView& bias) {
  constexpr int64_t kChunk = 256;
  const int64_t num_outputs = codes.size(0), num_inputs = codes.size(1);
  const int64_t num_rows = x.numel() / num_inputs;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = num_outputs;
  Tensor out = new_empty(x, sizes, ScalarType::BFloat16);
  Tensor wide = new_empty(x, {std::min(kChunk, num_outputs), num_inputs}, ScalarType::BFloat16);
  const auto* from = static_cast<const int8_t*>(codes.const_data_ptr());
  auto* weight = static_cast<uint16_t*>(wide.mutable_data_ptr());
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  for (int64_t first = 0; first < num_outputs; first += kChunk) {
    const int64_t count = std::min(kChunk, num_outputs - first);
    each(count, 16, [&](int64_t n) {
      // Codes are whole numbers of at most eight bits: the upper half is all of them.
      for (int64_t k = 0; k < num_inputs; ++k) {
        const float v = from[(first + n) * num_inputs + k];
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        weight[n * num_inputs + k] = uint16_t(bits >> 16);
      }
    });
    const Tensor part = torch::stable::narrow(wide, 0, 0, count);
    const Tensor y = torch::stable::contiguous(aten_linear(x, part, std::nullopt));
    const auto* product = static_cast<const uint16_t*>(y.const_data_ptr());
    each(num_rows, 64, [&](int64_t m) {
      for (int64_t n = 0; n < count; ++n) {
        float v = widen(product[m * count + n]) * scales[first + n];
        if (bias.data != nullptr) v += bias.at(first + n);
        to[m * num_outputs + first + n] = narrow(v);
      }
    });
  }
  return out;
}

Tensor int8_linear(const Tensor& x, const Tensor& codes, const Tensor& scales,
                   const std::optional<Tensor>& bias) {
  check_cpu(codes, ScalarType::Char, "codes");
  check_cpu(scales, ScalarType::Float, "scales");
  const Matrix matrix = row_matrix(Kind::kInt8, codes);
  check_rows(x, matrix.num_inputs);
  STD_TORCH_CHECK(scales.numel() == matrix.num_outputs && scales.is_contiguous(),
                  "scales must be [N], contiguous");
  const auto* factors = static_cast<const float*>(scales.const_data_ptr());
  const BiasView view(bias, matrix.num_outputs);
  if (x.numel() > kMaxRows * matrix.num_inputs) return int8_chunks(x, codes, factors, view);
  return matrix_product(x, matrix, factors, view);
}

// Planes `[N, K]`; low is null for a draft's.
struct Planes {
  Planes(const Tensor& high, const Tensor* low, const Tensor& bases) {
    check_cpu(high, ScalarType::Byte, "high");
    check_cpu(bases, ScalarType::Short, "bases");
    matrix = row_matrix(Kind::kDraft, high);
    STD_TORCH_CHECK(bases.dim() == 1 && bases.is_contiguous() &&
                        bases.size(0) == matrix.num_outputs,
                    "bases must be [N], contiguous");
    matrix.bases = static_cast<const int16_t*>(bases.const_data_ptr());
    if (low == nullptr) return;
    check_cpu(*low, ScalarType::Byte, "low");
    STD_TORCH_CHECK(low->dim() == 2 && low->is_contiguous() && low->size(0) == high.size(0) &&
                        low->size(1) == high.size(1),
                    "low must be as large as high, contiguous");
    matrix.kind = Kind::kSplit;
    matrix.low = low->const_data_ptr();
  }
  void join(int64_t row, const Exceptions& exceptions, uint16_t* to) const {
    const int64_t count = matrix.num_inputs;
    const auto* low = static_cast<const uint8_t*>(matrix.low);
    join_row(static_cast<const uint8_t*>(matrix.codes) + row * count,
             low == nullptr ? nullptr : low + row * count, matrix.bases[row], count, to);
    exceptions.each_of(row, row + 1,
                       [&](int64_t, int64_t k, float value) { to[k] = narrow(value); });
  }
  Matrix matrix;
};

// Many rows: planes to bfloat16, a chunk of outputs at a time, and torch's product.
Tensor split_chunks(const Tensor& x, const Tensor& high, const Planes& planes,
                    const Exceptions& exceptions, const std::optional<Tensor>& bias) {
  constexpr int64_t kChunk = 256;
  const int64_t num_outputs = high.size(0), num_inputs = high.size(1);
  const int64_t num_rows = x.numel() / num_inputs;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = num_outputs;
  Tensor out = new_empty(x, sizes, ScalarType::BFloat16);
  Tensor wide = new_empty(x, {std::min(kChunk, num_outputs), num_inputs}, ScalarType::BFloat16);
  auto* weight = static_cast<uint16_t*>(wide.mutable_data_ptr());
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  std::optional<Tensor> added;
  if (bias.has_value())
    added = is_bfloat16(*bias) ? *bias : torch::stable::to(*bias, ScalarType::BFloat16);
  for (int64_t first = 0; first < num_outputs; first += kChunk) {
    const int64_t count = std::min(kChunk, num_outputs - first);
    each(count, 16, [&](int64_t n) {
      planes.join(first + n, exceptions, weight + n * num_inputs);
    });
    std::optional<Tensor> share;
    if (added.has_value()) share = torch::stable::narrow(*added, 0, first, count);
    const Tensor part = torch::stable::narrow(wide, 0, 0, count);
    const Tensor y = torch::stable::contiguous(aten_linear(x, part, share));
    const auto* product = static_cast<const uint16_t*>(y.const_data_ptr());
    each(num_rows, 64, [&](int64_t m) {
      std::memcpy(to + m * num_outputs + first, product + m * count, 2 * count);
    });
  }
  return out;
}

Tensor split_linear(const Tensor& x, const Tensor& high, const std::optional<Tensor>& low,
                    const Tensor& bases, const std::optional<Tensor>& exceptions,
                    const std::optional<Tensor>& exception_values,
                    const std::optional<Tensor>& bias) {
  const Planes planes(high, low.has_value() ? &*low : nullptr, bases);
  const Matrix& matrix = planes.matrix;
  check_rows(x, matrix.num_inputs);
  const BiasView view(bias, matrix.num_outputs);
  Exceptions kept{};
  if (exceptions.has_value() && exception_values.has_value())
    kept = {*exceptions, *exception_values, matrix.num_outputs, matrix.num_inputs};
  if (!low.has_value()) kept = {};  // a draft takes them for zero
  if (x.numel() > kMaxRows * matrix.num_inputs)
    return split_chunks(x, high, planes, kept, bias);
  return matrix_product(x, matrix, nullptr, view, kept);
}

Tensor split_rows(const Tensor& ids, const Tensor& high, const Tensor& low, const Tensor& bases,
                  const std::optional<Tensor>& exceptions,
                  const std::optional<Tensor>& exception_values) {
  check_cpu(ids, ScalarType::Long, "ids");
  const Planes planes(high, &low, bases);
  const int64_t num_rows = high.size(0), num_inputs = high.size(1), count = ids.numel();
  Exceptions kept{};
  if (exceptions.has_value() && exception_values.has_value())
    kept = {*exceptions, *exception_values, num_rows, num_inputs};
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(num_inputs);
  Tensor out = new_empty(high, sizes, ScalarType::BFloat16);
  const Tensor flat = torch::stable::contiguous(ids);
  const auto* rows = static_cast<const int64_t*>(flat.const_data_ptr());
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < num_rows, "no such row: ", rows[i]);
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  each(count, grain_of(2 * num_inputs),
       [&](int64_t i) { planes.join(rows[i], kept, to + i * num_inputs); });
  return out;
}

void check_packing(int64_t num_outputs, int64_t num_inputs, int64_t group_size,
                   int64_t block_rows) {
  STD_TORCH_CHECK(block_rows == 64 || block_rows == 32, "block_rows must be 64 or 32");
  STD_TORCH_CHECK(group_size > 0 && group_size % 4 == 0 && num_inputs % group_size == 0,
                  "group_size must be a multiple of 4 that divides K");
  STD_TORCH_CHECK(num_outputs % block_rows == 0, "N must be a multiple of block_rows");
}

Matrix packed_matrix(Kind kind, const Tensor& hi, const Tensor& scales, int64_t group_size,
                     int64_t block_rows) {
  check_cpu(hi, ScalarType::Byte, "packed codes");
  check_cpu(scales, ScalarType::BFloat16, "scales");
  STD_TORCH_CHECK(hi.dim() == 2 && hi.is_contiguous(), "packed codes must be [N, K / 2]");
  Matrix m{};
  m.kind = kind;
  m.codes = hi.const_data_ptr();
  m.scales = static_cast<const uint16_t*>(scales.const_data_ptr());
  m.num_outputs = hi.size(0);
  m.num_inputs = 2 * hi.size(1);
  m.group_size = group_size;
  m.block_rows = block_rows;
  check_packing(m.num_outputs, m.num_inputs, group_size, block_rows);
  STD_TORCH_CHECK(scales.is_contiguous() &&
                      scales.numel() == m.num_inputs / group_size * m.num_outputs * 2,
                  "scales must be [K / group_size, N, 2]");
  return m;
}

Tensor int4_linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   int64_t group_size, int64_t block_rows) {
  const Matrix matrix = packed_matrix(Kind::kInt4, packed, scales, group_size, block_rows);
  check_rows(x, matrix.num_inputs);
  return matrix_product(x, matrix, nullptr, BiasView(std::nullopt, 0));
}

Tensor nested_linear(const Tensor& x, const Tensor& hi, const Tensor& scales, const Tensor& lo,
                     int64_t group_size, int64_t block_rows) {
  Matrix matrix = packed_matrix(Kind::kNested, hi, scales, group_size, block_rows);
  check_rows(x, matrix.num_inputs);
  check_cpu(lo, ScalarType::Byte, "lo");
  STD_TORCH_CHECK(lo.is_contiguous() && lo.numel() == hi.numel(), "lo must be [N, K / 2]");
  matrix.low = lo.const_data_ptr();
  return matrix_product(x, matrix, nullptr, BiasView(std::nullopt, 0));
}

ExpertShape expert_shape(const Tensor& x, const Tensor& index, const Tensor& addresses,
                         int64_t kind, int64_t intermediate, int64_t group_size,
                         int64_t block_rows) {
  check_cpu(x, ScalarType::BFloat16, "x");
  check_cpu(index, ScalarType::Long, "index");
  check_cpu(addresses, ScalarType::Long, "addresses");
  STD_TORCH_CHECK(kind >= 0 && kind <= 3, "kind must be 0 to 3");
  STD_TORCH_CHECK(x.dim() == 2 && index.dim() == 2 && index.size(0) == x.size(0),
                  "x must be [T, C] and index [T, k]");
  STD_TORCH_CHECK(intermediate > 0 && x.size(1) > 0, "experts must have inputs and units");
  const ExpertShape shape{Kind(kind), x.size(1), intermediate, group_size, block_rows};
  STD_TORCH_CHECK(addresses.dim() == 2 && addresses.is_contiguous() &&
                      addresses.size(1) == shape.num_parts(),
                  "addresses must be [experts, parts], contiguous");
  if (kind >= 2) {
    check_packing(2 * intermediate, shape.hidden, group_size, block_rows);
    check_packing(shape.hidden, intermediate, group_size, block_rows);
  }
  return shape;
}

void gated_experts(Tensor out, const Tensor& x, const Tensor& index, std::vector<int64_t> experts,
                   const Tensor& addresses, int64_t kind, int64_t intermediate,
                   int64_t group_size, int64_t block_rows) {
  const ExpertShape shape =
      expert_shape(x, index, addresses, kind, intermediate, group_size, block_rows);
  const bool is_float = out.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(out.is_cpu() && (is_float || is_bfloat16(out)),
                  "out must be bfloat16 or float32");
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == index.numel() && out.size(1) == shape.hidden &&
                      (out.stride(1) == 1 || out.numel() == 0),
                  "out must be [T * k, C], rows contiguous");
  STD_TORCH_CHECK(addresses.size(0) == int64_t(experts.size()), "one row of addresses per expert");
  int64_t most = -1;
  for (const int64_t expert : experts) {
    STD_TORCH_CHECK(expert >= 0 && expert < 1 << 20, "no such expert: ", expert);
    most = std::max(most, expert);
  }
  std::vector<int32_t> slot_of(most + 1, -1);
  for (size_t i = 0; i < experts.size(); ++i) slot_of[experts[i]] = int32_t(i);
  ExpertRooms& rooms = expert_rooms();
  const Tensor choices = torch::stable::contiguous(index);
  route(static_cast<const int64_t*>(choices.const_data_ptr()), index.numel(), slot_of,
        int64_t(experts.size()), static_cast<const int64_t*>(addresses.const_data_ptr()),
        shape.num_parts(), rooms.routing);
  if (rooms.routing.segments.empty()) return;
  run_experts(shape, x, index.size(1), rooms, out.mutable_data_ptr(), out.stride(0), is_float);
}

void check_weights(const Tensor& weights) {
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_cpu() &&
                      (weights.scalar_type() == ScalarType::Float || is_bfloat16(weights)),
                  "weights must be [T, k], bfloat16 or float32");
}

Tensor combine_experts(const Tensor& rows, const Tensor& weights) {
  check_weights(weights);
  const bool is_float = rows.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(rows.dim() == 2 && rows.is_cpu() && (is_float || is_bfloat16(rows)) &&
                      rows.size(0) == weights.numel() &&
                      (rows.stride(1) == 1 || rows.numel() == 0),
                  "rows must be [T * k, C], bfloat16 or float32");
  Tensor out = new_empty(rows, {weights.size(0), rows.size(1)}, ScalarType::BFloat16);
  combine(rows.const_data_ptr(), is_float, rows.stride(0), weights, rows.size(1),
          static_cast<uint16_t*>(out.mutable_data_ptr()));
  return out;
}

Tensor draft_experts(const Tensor& x, const Tensor& index, const Tensor& weights,
                     const Tensor& addresses, Tensor counts, int64_t kind, int64_t intermediate,
                     int64_t group_size, int64_t block_rows) {
  const ExpertShape shape =
      expert_shape(x, index, addresses, kind, intermediate, group_size, block_rows);
  check_weights(weights);
  check_cpu(counts, ScalarType::Int, "counts");
  const int64_t num_experts = addresses.size(0), num_choices = index.numel();
  STD_TORCH_CHECK(weights.size(0) == index.size(0) && weights.size(1) == index.size(1),
                  "weights must be as large as index");
  STD_TORCH_CHECK(counts.is_contiguous() && counts.numel() == num_experts, "counts must be [E]");
  Tensor out = new_empty(x, {x.size(0), shape.hidden}, ScalarType::BFloat16);
  ExpertRooms& rooms = expert_rooms();
  const Tensor choices = torch::stable::contiguous(index);
  const auto* chosen = static_cast<const int64_t*>(choices.const_data_ptr());
  for (int64_t i = 0; i < num_choices; ++i)
    STD_TORCH_CHECK(chosen[i] >= 0 && chosen[i] < num_experts, "no such expert: ", chosen[i]);
  const auto* parts = static_cast<const int64_t*>(addresses.const_data_ptr());
  std::vector<int32_t> slot_of(num_experts);
  for (int64_t e = 0; e < num_experts; ++e)
    slot_of[e] = parts[e * shape.num_parts()] ? int32_t(e) : -1;
  route(chosen, num_choices, slot_of, num_experts, parts, shape.num_parts(), rooms.routing);
  auto* seen = static_cast<int32_t*>(counts.mutable_data_ptr());
  for (int64_t i = 0; i < num_choices; ++i) ++seen[chosen[i]];
  float* rows = rooms.rows.take<float>(num_choices * shape.hidden);
  for (int64_t i = 0; i < num_choices; ++i)
    if (slot_of[chosen[i]] < 0) std::fill_n(rows + i * shape.hidden, shape.hidden, 0.f);
  if (!rooms.routing.segments.empty())
    run_experts(shape, x, index.size(1), rooms, rows, shape.hidden, true);
  combine(rows, true, shape.hidden, weights, shape.hidden,
          static_cast<uint16_t*>(out.mutable_data_ptr()));
  return out;
}

const float* float_matrix(const std::optional<Tensor>& t, int64_t rows, int64_t columns,
                          const char* name) {
  if (!t.has_value()) return nullptr;
  check_cpu(*t, ScalarType::Float, name);
  STD_TORCH_CHECK(t->is_contiguous() && t->numel() == rows * columns, name, " has a wrong shape");
  return static_cast<const float*>(t->const_data_ptr());
}

Tensor predict_experts(const Tensor& x, const Tensor& index, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& bias, const std::optional<Tensor>& table,
                       const std::optional<Tensor>& table_bias,
                       const std::optional<Tensor>& outer, int64_t num_experts) {
  check_cpu(x, ScalarType::BFloat16, "x"), check_cpu(index, ScalarType::Long, "index");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == 1 && index.dim() == 2 && index.size(0) == 1,
                  "predict_experts takes one token");
  STD_TORCH_CHECK(weight.has_value() || table.has_value(), "predict_experts needs a branch");
  STD_TORCH_CHECK(num_experts > 0, "there must be experts");
  Head head{};
  head.num_experts = num_experts, head.num_inputs = x.size(1);
  const int64_t rows = num_experts + table.has_value();
  head.weight = float_matrix(weight, rows, x.size(1), "weight");
  head.bias = float_matrix(bias, rows, 1, "bias");
  STD_TORCH_CHECK(weight.has_value() == bias.has_value(), "weight and bias come together");
  if (table.has_value()) {
    STD_TORCH_CHECK(outer.has_value() && table_bias.has_value() && outer->dim() == 2,
                    "table, table_bias and outer come together");
    head.num_units = outer->size(1);
    head.table = float_matrix(table, num_experts, head.width(), "table");
    head.table_bias = float_matrix(table_bias, head.width(), 1, "table_bias");
    head.outer = float_matrix(outer, num_experts, head.num_units, "outer");
  }
  const Tensor choices = torch::stable::contiguous(index);
  const auto* chosen = static_cast<const int64_t*>(choices.const_data_ptr());
  for (int64_t j = 0; j < index.size(1); ++j)
    STD_TORCH_CHECK(chosen[j] >= 0 && chosen[j] < num_experts, "no such expert: ", chosen[j]);
  std::vector<float> wide(x.size(1));
  const auto* from = static_cast<const uint16_t*>(x.const_data_ptr());
  for (int64_t c = 0; c < x.size(1); ++c) wide[c] = widen(from[c * x.stride(1)]);
  Tensor out = new_empty(x, {num_experts}, ScalarType::Float);
  head.shares(wide.data(), chosen, index.size(1), static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

Tensor attend(const Tensor& query, const Tensor& keys, const Tensor& values, int64_t num_cached,
              double scale) {
  const ScalarType type = query.scalar_type();
  const bool is_float = type == ScalarType::Float;
  STD_TORCH_CHECK(is_float || is_bfloat16(query), "attend takes bfloat16 or float32");
  check_cpu(query, type, "query"), check_cpu(keys, type, "keys"), check_cpu(values, type, "values");
  STD_TORCH_CHECK(query.dim() == 4 && keys.dim() == 4 && values.dim() == 4 && query.size(0) == 1 &&
                      keys.size(0) == 1 && values.size(0) == 1,
                  "attend takes [1, heads, positions, size]");
  const int64_t num_heads = query.size(1), num_queries = query.size(2), head_size = query.size(3);
  const int64_t num_groups = keys.size(1), num_keys = keys.size(2), value_size = values.size(3);
  STD_TORCH_CHECK(num_groups > 0 && num_heads % num_groups == 0 && values.size(1) == num_groups &&
                      keys.size(3) == head_size && values.size(2) == num_keys && head_size > 0 &&
                      value_size > 0,
                  "heads, positions or sizes of query, keys and values do not fit");
  STD_TORCH_CHECK(num_cached >= 0 && num_cached + num_queries <= num_keys,
                  "keys must include the new positions");
  STD_TORCH_CHECK(query.stride(3) == 1 && keys.stride(3) == 1 && values.stride(3) == 1,
                  "the last axis must be contiguous");
  Tensor out = new_empty(query, {1, num_queries, num_heads, value_size}, type);
  if (num_queries == 0) return out;
  Attention a{};
  a.kind = is_float ? Kind::kFloat : Kind::kDense;
  a.keys = keys.const_data_ptr(), a.values = values.const_data_ptr();
  for (int i = 0; i < 2; ++i)
    a.key_strides[i] = keys.stride(i + 1), a.value_strides[i] = values.stride(i + 1);
  a.num_groups = num_groups, a.group_heads = num_heads / num_groups;
  a.num_queries = num_queries, a.num_cached = num_cached;
  a.head_size = head_size, a.value_size = value_size, a.scale = float(scale);
  thread_local Room room;
  const int64_t item = a.item_bytes(), length = padded(head_size) * item;
  char* rows = room.take<char>(num_heads * num_queries * length);
  const char* from = static_cast<const char*>(query.const_data_ptr());
  for (int64_t h = 0; h < num_heads; ++h)
    for (int64_t t = 0; t < num_queries; ++t) {
      char* to = rows + (h * num_queries + t) * length;
      std::memset(to, 0, length);
      std::memcpy(to, from + (h * query.stride(1) + t * query.stride(2)) * item, head_size * item);
    }
  run_attention(a, rows, length, out.mutable_data_ptr());
  return out;
}

// Copies `[1, G, T, D]` to positions `start` and on of a room `[1, G, N, D]`.
void append_positions(const Tensor& states, Tensor& room, int64_t start, int64_t item) {
  const char* from = static_cast<const char*>(states.const_data_ptr());
  char* to = static_cast<char*>(room.mutable_data_ptr());
  for (int64_t g = 0; g < states.size(1); ++g)
    for (int64_t t = 0; t < states.size(2); ++t)
      std::memcpy(to + (g * room.stride(1) + (start + t) * room.stride(2)) * item,
                  from + (g * states.stride(1) + t * states.stride(2)) * item,
                  states.size(3) * item);
}

Tensor attend_cached(const Tensor& query, const Tensor& new_keys, const Tensor& new_values,
                     Tensor keys, Tensor values, int64_t num_cached, double scale) {
  const ScalarType type = query.scalar_type();
  for (const auto& [states, room] : {std::pair{&new_keys, &keys}, std::pair{&new_values, &values}}) {
    check_cpu(*states, type, "new states"), check_cpu(*room, type, "room");
    STD_TORCH_CHECK(states->dim() == 4 && room->dim() == 4 && states->size(0) == 1 &&
                        states->size(1) == room->size(1) && states->size(3) == room->size(3) &&
                        states->size(2) == query.size(2) && states->stride(3) == 1 &&
                        room->stride(3) == 1 && num_cached >= 0 &&
                        num_cached + states->size(2) <= room->size(2),
                    "new keys and values do not fit their room");
    append_positions(*states, *room, num_cached, type == ScalarType::Float ? 4 : 2);
  }
  return attend(query, keys, values, num_cached, scale);
}

}  // namespace
}  // namespace mira

STABLE_TORCH_LIBRARY(mira, m) {
  m.def("dense_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("int8_linear(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor");
  m.def(
      "split_linear(Tensor x, Tensor high, Tensor? low, Tensor bases, Tensor? exceptions,"
      " Tensor? exception_values, Tensor? bias) -> Tensor");
  m.def(
      "split_rows(Tensor ids, Tensor high, Tensor low, Tensor bases, Tensor? exceptions,"
      " Tensor? exception_values) -> Tensor");
  m.def(
      "int4_linear(Tensor x, Tensor packed, Tensor scales, int group_size, int block_rows)"
      " -> Tensor");
  m.def(
      "nested_linear(Tensor x, Tensor hi, Tensor scales, Tensor lo, int group_size,"
      " int block_rows) -> Tensor");
  m.def(
      "gated_experts_(Tensor(a!) out, Tensor x, Tensor index, int[] experts, Tensor addresses,"
      " int kind, int intermediate, int group_size, int block_rows) -> ()");
  m.def("combine_experts(Tensor rows, Tensor weights) -> Tensor");
  m.def(
      "draft_experts(Tensor x, Tensor index, Tensor weights, Tensor addresses, Tensor(a!) counts,"
      " int kind, int intermediate, int group_size, int block_rows) -> Tensor");
  m.def(
      "predict_experts(Tensor x, Tensor index, Tensor? weight, Tensor? bias, Tensor? table,"
      " Tensor? table_bias, Tensor? outer, int num_experts) -> Tensor");
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, int num_cached, float scale) -> Tensor");
  m.def(
      "attend_cached_(Tensor query, Tensor new_keys, Tensor new_values, Tensor(a!) keys,"
      " Tensor(b!) values, int num_cached, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mira, CPU, m) {
  m.impl("dense_linear", TORCH_BOX(&mira::dense_linear));
  m.impl("int8_linear", TORCH_BOX(&mira::int8_linear));
  m.impl("split_linear", TORCH_BOX(&mira::split_linear));
  m.impl("split_rows", TORCH_BOX(&mira::split_rows));
  m.impl("int4_linear", TORCH_BOX(&mira::int4_linear));
  m.impl("nested_linear", TORCH_BOX(&mira::nested_linear));
  m.impl("gated_experts_", TORCH_BOX(&mira::gated_experts));
  m.impl("combine_experts", TORCH_BOX(&mira::combine_experts));
  m.impl("draft_experts", TORCH_BOX(&mira::draft_experts));
  m.impl("predict_experts", TORCH_BOX(&mira::predict_experts));
  m.impl("attend", TORCH_BOX(&mira::attend));
  m.impl("attend_cached_", TORCH_BOX(&mira::attend_cached));
}
