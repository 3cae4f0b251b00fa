// y[M, N] = x[M, K] * w^T for few rows, with the weights w of qmm_weights.metal.
//
// Rule: a row's bits depend neither on the count of rows nor on M, which is how many there is room for. Every
// product is one explicit fma, so that no compiler may contract it in one instance and not in another, and rows
// share nothing but the weights.
constant constexpr int QMM_COLUMNS = 4;           // columns of a SIMD-group: what a loaded x is used for

// Where row m of a product is read from x, and where it goes in y.
struct QmmRows {
  int from(int m) const { return m; }
  int to(int m) const { return m; }
};
// The same for choices of experts, which are sorted by expert: `order` has their places, and `per_row` of them
// share a row of x.
struct QmmChoices {
  const device uint* order;
  int per_row;
  int from(int m) const { return int(order[m]) / per_row; }
  int to(int m) const { return int(order[m]); }
};

// Adds to sums[m] what row m gives with QMM_COLUMNS columns, those from n0 on, for m < count: of K, the spans
// that are the turn of `part` of SPLIT. Lanes share a span; each sums over its values in rising order.
template <int M, int SPLIT, typename R, typename W, typename T>
void qmm_add(
    R rows,
    W weights,
    const device T* x,
    int count,
    int n0,
    int N,
    int part,
    uint lane,
    thread float (&sums)[M][QMM_COLUMNS]) {
  const int K = weights.K;
  int from[M] = {};
#pragma unroll
  for (int m = 0; m < M; m++) {
    if (m < count) {
      from[m] = rows.from(m);
    }
  }
  for (int k0 = QMM_SPAN * part; k0 < K; k0 += QMM_SPAN * SPLIT) {
    float values[QMM_COLUMNS][QMM_RUN] = {};
#pragma unroll
    for (int c = 0; c < QMM_COLUMNS; c++) {
      if (n0 + c < N) {
        weights.run(n0 + c, k0, lane, values[c]);
      }
    }
    const int k = k0 + QMM_RUN * int(lane);
    if (k < K) {
#pragma unroll
      for (int m = 0; m < M; m++) {
        if (m < count) {
#pragma unroll
          for (int i = 0; i < QMM_RUN; i++) {
            const float at = float(x[from[m] * K + k + i]);
#pragma unroll
            for (int c = 0; c < QMM_COLUMNS; c++) {
              sums[m][c] = fma(values[c][i], at, sums[m][c]);
            }
          }
        }
      }
    }
  }
}

// Writes the sums to y: over the lanes by simd_sum, then over the parts in order.
// `partial` has SPLIT * M * QMM_COLUMNS floats; where SPLIT is 1 it is not touched.
template <int M, int SPLIT, typename R, typename T>
void qmm_put(
    R rows,
    const thread float (&sums)[M][QMM_COLUMNS],
    int count,
    device T* y,
    int n0,
    int N,
    threadgroup float* partial,
    int part,
    uint lane) {
#pragma unroll
  for (int m = 0; m < M; m++) {
    if (m < count) {
#pragma unroll
      for (int c = 0; c < QMM_COLUMNS; c++) {
        const float sum = simd_sum(sums[m][c]);
        if (SPLIT > 1 && lane == 0) {
          partial[(part * M + m) * QMM_COLUMNS + c] = sum;
        } else if (lane == 0 && n0 + c < N) {
          y[rows.to(m) * N + n0 + c] = T(sum);
        }
      }
    }
  }
  if (SPLIT > 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int at = 32 * part + int(lane);  // 64 threads or more, so one value for each
    const int row = at / QMM_COLUMNS, c = at % QMM_COLUMNS;
    if (row < count && n0 + c < N) {
      float sum = partial[at];
#pragma unroll
      for (int s = 1; s < SPLIT; s++) {
        sum += partial[s * M * QMM_COLUMNS + at];
      }
      y[rows.to(row) * N + n0 + c] = T(sum);
    }
  }
}

// SPLIT SIMD-groups share K; where SPLIT is 1, a threadgroup is two SIMD-groups that share nothing. M >= count.
template <int M, int SPLIT, typename R, typename W, typename T>
void small_qmm(
    R rows,
    W weights,
    const device T* x,
    int count,
    device T* y,
    int N,
    threadgroup float* partial,
    uint tile,
    uint simd,
    uint lane) {
  const int n0 = QMM_COLUMNS * int(SPLIT > 1 ? tile : 2 * tile + simd);
  const int part = SPLIT > 1 ? int(simd) : 0;
  float sums[M][QMM_COLUMNS] = {};
  qmm_add<M, SPLIT>(rows, weights, x, count, n0, N, part, lane, sums);
  qmm_put<M, SPLIT>(rows, sums, count, y, n0, N, partial, part, lane);
}

// The same with the weights [E, N, ...] of experts: `experts` of `choices` choices, rising, and their `order`. The
// threadgroups number `first` take the next M choices of an expert from there on, each weight read once for them;
// they have nothing to do where others take choice `first`.
template <int M, int SPLIT, typename W, typename T>
void small_qmm_experts(
    W weights,
    const device T* x,
    const device uint* experts,
    const device uint* order,
    int choices,
    int per_row,
    device T* y,
    int N,
    threadgroup float* partial,
    uint3 group,
    uint simd,
    uint lane) {
  const int first = int(group.y);
  const uint expert = experts[first];
  int before = 0;
  while (before < first && experts[first - before - 1] == expert) {
    before++;
  }
  if (before % M > 0) {
    return;
  }
  int count = 1;
  while (count < M && first + count < choices && experts[first + count] == expert) {
    count++;
  }
  const QmmChoices rows = {order + first, per_row};
  small_qmm<M, SPLIT>(
      rows, weights.from(size_t(expert) * N), x, count, y, N, partial, group.x, simd, lane);
}

constant constexpr int QMM_TILES = 2;                 // of 8 columns, that a SIMD-group computes
constant constexpr int QMM_SPLIT = 4;                 // SIMD-groups that share K
constant constexpr int QMM_BLOCK = 128;               // values of a column that a SIMD-group takes in turn
constant constexpr int QMM_WIDTH = 8 * QMM_TILES;     // columns of a threadgroup

// The same by simdgroup_matrix. A threadgroup of QMM_SPLIT SIMD-groups computes QMM_WIDTH columns of all rows.
// In a fragment of the weights, which is [8 of K, 8 columns], a lane holds two columns at `row`; in one of x,
// [8 rows, 8 of K], two of K. What counts as "of K" is free as long as both agree: step i takes value i of each
// of 8 runs, so that a lane reads whole runs. `partial` has QMM_SPLIT * M * QMM_WIDTH floats; M is 8 or 16.
template <int M, int BITS, int GROUP, int FORMAT, typename T, typename S, typename B>
void small_qmm_matrix(
    const device T* x,
    int count,
    const device uint* w,
    const device S* scales,
    const device B* biases,
    device T* y,
    int N,
    int K,
    threadgroup float* partial,
    uint tile,
    uint simd,
    uint lane) {
  constexpr int ROW_TILES = M / 8;
  constexpr int GROUPS = QMM_BLOCK / GROUP;
  const int row = int(4 * (lane >> 4) + ((lane >> 1) & 3));
  const int pair = int(4 * ((lane >> 3) & 1) + 2 * (lane & 1));
  const int n0 = QMM_WIDTH * int(tile);
  simdgroup_float8x8 sums[ROW_TILES][QMM_TILES];
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
    for (int t = 0; t < QMM_TILES; t++) {
      sums[r][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  for (int k0 = QMM_BLOCK * int(simd); k0 < K; k0 += QMM_BLOCK * QMM_SPLIT) {
    float scale[QMM_TILES][2] = {}, bias[QMM_TILES][2] = {};  // of group `row` of the block
#pragma unroll
    for (int t = 0; t < QMM_TILES; t++) {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const int n = n0 + 8 * t + pair + p;
        const int group = k0 / GROUP + row;
        if (row < GROUPS && group < K / GROUP && n < N) {
          scale[t][p] = qmm_scale<FORMAT>(scales[size_t(n) * (K / GROUP) + group]);
          if (FORMAT == QMM_AFFINE) {
            bias[t][p] = float(biases[size_t(n) * (K / GROUP) + group]);
          }
        }
      }
    }
    for (int k8 = 0; k8 < QMM_BLOCK; k8 += 8 * QMM_RUN) {
      float at[ROW_TILES][2][QMM_RUN] = {};
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const int m = 8 * r + row;
          const int k = k0 + k8 + QMM_RUN * (pair + p);
          if (m < count && k < K) {
#pragma unroll
            for (int i = 0; i < QMM_RUN; i++) {
              at[r][p][i] = float(x[m * K + k + i]);
            }
          }
        }
      }
      const int k = k0 + k8 + QMM_RUN * row;
      const uint group = uint(k8 + QMM_RUN * row) / GROUP;
      const ushort owner = ushort(16 * (group >> 2) + 2 * (group & 3) + (lane & 9));  // whose `row` is the group
#pragma unroll
      for (int t = 0; t < QMM_TILES; t++) {
        float values[2][QMM_RUN] = {};
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const float s = simd_shuffle(scale[t][p], owner);
          const float b = FORMAT == QMM_AFFINE ? simd_shuffle(bias[t][p], owner) : 0.0f;
          const int n = n0 + 8 * t + pair + p;
          if (k < K && n < N) {
            qmm_unpack<BITS, FORMAT>(w + size_t(n) * (K / 32 * BITS), k / QMM_RUN, s, b, values[p]);
          }
        }
#pragma unroll
        for (int i = 0; i < QMM_RUN; i++) {
          simdgroup_float8x8 b;
          b.thread_elements()[0] = values[0][i];
          b.thread_elements()[1] = values[1][i];
#pragma unroll
          for (int r = 0; r < ROW_TILES; r++) {
            simdgroup_float8x8 a;
            a.thread_elements()[0] = at[r][0][i];
            a.thread_elements()[1] = at[r][1][i];
            simdgroup_multiply_accumulate(sums[r][t], a, b, sums[r][t]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
    for (int t = 0; t < QMM_TILES; t++) {
      const int at = (int(simd) * M + 8 * r) * QMM_WIDTH + 8 * t;
      simdgroup_store(sums[r][t], partial + at, QMM_WIDTH);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(32 * simd + lane); i < count * QMM_WIDTH; i += 32 * QMM_SPLIT) {
    float sum = partial[i];
#pragma unroll
    for (int s = 1; s < QMM_SPLIT; s++) {
      sum += partial[s * M * QMM_WIDTH + i];
    }
    if (n0 + i % QMM_WIDTH < N) {
      y[i / QMM_WIDTH * N + n0 + i % QMM_WIDTH] = T(sum);
    }
  }
}
