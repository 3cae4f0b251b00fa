// The products of small_qmm.metal by Metal 4's tensor operations: a tile of 16 rows and 32 columns for each
// SIMD-group, with the weights of qmm_weights.metal. For rows of 16 bits.
//
// Rule: an element's place is asked of its tensor, since Apple leaves open which lane holds it, and whether any does.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

constant constexpr int TENSOR_ROWS = 16, TENSOR_COLUMNS = 32, TENSOR_DEPTH = 16;  // of one operation
constant constexpr int TENSOR_RUNS = TENSOR_DEPTH / QMM_RUN;                     // of a lane's weights
constant constexpr int TENSOR_SPLIT = 8;                                         // SIMD-groups that share K
constant constexpr int TENSOR_TILE = TENSOR_DEPTH * TENSOR_COLUMNS;              // floats, as many as of the sums

// SIMD-groups take groups of K in turn, and lane c loads column c. `shared` has TENSOR_SPLIT * TENSOR_TILE floats.
// Rows from `count` on are 0, so that an operation is the same for any count. A weight is bfloat twice, of which the
// second is what the first lost: together they keep 16 bits or more, and the range of a float. One holds a weight
// of a format of floats.
template <int BITS, int GROUP, int FORMAT, typename S, typename B, typename T>
void tensor_qmm(
    QmmQuantized<BITS, GROUP, FORMAT, S, B> weights,
    const device T* x,
    int count,
    device T* y,
    int N,
    threadgroup float* shared,
    uint tile,
    uint simd,
    uint lane) {
  constexpr auto shape = mpp::tensor_ops::matmul2d_descriptor(
      TENSOR_ROWS,
      TENSOR_COLUMNS,
      TENSOR_DEPTH,
      false,
      false,
      false,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<shape, execution_simdgroup> product;
  auto rows = product.template get_left_input_cooperative_tensor<T, bfloat, float>();
  auto high = product.template get_right_input_cooperative_tensor<T, bfloat, float>();
  auto low = product.template get_right_input_cooperative_tensor<T, bfloat, float>();
  auto sums = product.template get_destination_cooperative_tensor<
      remove_addrspace_t<decltype(rows)>,
      remove_addrspace_t<decltype(high)>,
      float>();
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      sums[i] = 0.0f;
    }
  }
  const int K = weights.K;
  const int n0 = TENSOR_COLUMNS * int(tile), n = n0 + int(lane);
  threadgroup float* mine = shared + TENSOR_TILE * int(simd);
  const auto column = weights.from(n);
  for (int group = int(simd); group < K / GROUP; group += TENSOR_SPLIT) {
    float scale = {}, bias = {};
    if (n < N) {
      scale = qmm_scale<FORMAT>(column.scales[group]);
      if (FORMAT == QMM_AFFINE) {
        bias = float(column.biases[group]);
      }
    }
    for (int k = GROUP * group; k < GROUP * (group + 1); k += TENSOR_DEPTH) {
      float values[TENSOR_RUNS][QMM_RUN] = {};
      if (n < N) {
#pragma unroll
        for (int r = 0; r < TENSOR_RUNS; r++) {
          qmm_unpack<BITS, FORMAT>(column.w, k / QMM_RUN + r, scale, bias, values[r]);
        }
      }
#pragma unroll
      for (int i = 0; i < TENSOR_DEPTH; i++) {
        mine[TENSOR_COLUMNS * i + int(lane)] = values[i / QMM_RUN][i % QMM_RUN];
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (ushort i = 0; i < rows.get_capacity(); i++) {
        if (rows.is_valid_element(i)) {
          const auto at = rows.get_multidimensional_index(i);
          rows[i] = at[1] < count ? x[at[1] * K + k + at[0]] : T(0.0f);
        }
      }
#pragma unroll
      for (ushort i = 0; i < high.get_capacity(); i++) {
        if (high.is_valid_element(i)) {
          const auto at = high.get_multidimensional_index(i);
          const float value = mine[TENSOR_COLUMNS * at[1] + at[0]];
          high[i] = bfloat(value);
          low[i] = bfloat(value - float(high[i]));
        }
      }
      product.run(rows, high, sums);
      if (FORMAT == QMM_AFFINE) {
        product.run(rows, low, sums);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      const auto at = sums.get_multidimensional_index(i);
      mine[TENSOR_COLUMNS * at[1] + at[0]] = sums[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(32 * simd + lane); i < count * TENSOR_COLUMNS; i += 32 * TENSOR_SPLIT) {
    float sum = shared[i];
#pragma unroll
    for (int s = 1; s < TENSOR_SPLIT; s++) {
      sum += shared[s * TENSOR_TILE + i];
    }
    if (n0 + i % TENSOR_COLUMNS < N) {
      y[i / TENSOR_COLUMNS * N + n0 + i % TENSOR_COLUMNS] = T(sum);
    }
  }
}
