// y[M, N] = x[M, K] * dequant(w)^T for few rows: affine weights of 4 or 8 bits, every word of them read once.
//
// Rule: a row's bits do not depend on M. Every product is one explicit fma, so that no compiler may contract
// it in one instance and not in another, and rows share nothing but the weights.
//
// w [N, K * BITS / 32], scales and biases [N, K / GROUP]: mx.quantize's layout. K is a multiple of GROUP.
#include <metal_stdlib>
using namespace metal;

constant constexpr int QMM_RUN = 8;               // values of a column that a lane holds at once
constant constexpr int QMM_SPAN = 32 * QMM_RUN;   // values of a column that a SIMD-group holds at once
constant constexpr int QMM_COLUMNS = 4;           // columns of a SIMD-group: what a loaded x is used for

// What lane `lane` holds of a column's span that starts at k0: QMM_RUN values, 0 past the column's end.
// All lanes must call this together: a scale is loaded by one of them and handed to those that need it.
template <int BITS, int GROUP, typename S>
void qmm_run(
    const device uint* words,
    const device S* scales,
    const device S* biases,
    int k0,
    int K,
    uint lane,
    thread float* values) {
  const int group = k0 / GROUP + int(lane);
  float scale = 0, bias = 0;
  if (int(lane) < QMM_SPAN / GROUP && group < K / GROUP) {
    scale = float(scales[group]);
    bias = float(biases[group]);
  }
  const ushort owner = ushort(QMM_RUN * lane / GROUP);
  scale = simd_shuffle(scale, owner);
  bias = simd_shuffle(bias, owner);
  constexpr int PER_WORD = 32 / BITS;
  const int k = k0 + QMM_RUN * int(lane);
#pragma unroll
  for (int i = 0; i < QMM_RUN; i += PER_WORD) {
    const uint word = k < K ? words[(k + i) / PER_WORD] : 0;
#pragma unroll
    for (int j = 0; j < PER_WORD; j++) {
      values[i + j] = fma(scale, float((word >> (BITS * j)) & ((1u << BITS) - 1)), bias);
    }
  }
}

// One SIMD-group computes QMM_COLUMNS columns of all M rows, those from QMM_COLUMNS * tile on.
// Its lanes share K; the sum goes over a lane's values in rising order, then over the lanes by simd_sum.
template <int M, int BITS, int GROUP, typename T, typename S>
void small_qmm(
    const device T* x,
    const device uint* w,
    const device S* scales,
    const device S* biases,
    device T* y,
    int N,
    int K,
    uint tile,
    uint lane) {
  const int n0 = QMM_COLUMNS * int(tile);
  const int columns = min(QMM_COLUMNS, N - n0);
  float sums[M][QMM_COLUMNS] = {};
  for (int k0 = 0; k0 < K; k0 += QMM_SPAN) {
    float values[QMM_COLUMNS][QMM_RUN] = {};
#pragma unroll
    for (int c = 0; c < QMM_COLUMNS; c++) {
      if (c < columns) {
        const size_t n = n0 + c;
        const size_t groups = n * (K / GROUP);
        qmm_run<BITS, GROUP>(w + n * (K / 32 * BITS), scales + groups, biases + groups, k0, K, lane, values[c]);
      }
    }
    const int k = k0 + QMM_RUN * int(lane);
    if (k < K) {
#pragma unroll
      for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < QMM_RUN; i++) {
          const float at = float(x[m * K + k + i]);
#pragma unroll
          for (int c = 0; c < QMM_COLUMNS; c++) {
            sums[m][c] = fma(values[c][i], at, sums[m][c]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int c = 0; c < QMM_COLUMNS; c++) {
      const float sum = simd_sum(sums[m][c]);
      if (lane == 0 && c < columns) {
        y[m * N + n0 + c] = T(sum);
      }
    }
  }
}
