// softmax(scale * q k^T) v over block tables for few rows per sequence; all rows of a sequence and all heads that
// share K and V go over these once. paged_attention leaves a part's sums, paged_merge joins the parts.
//
// Rule: a row's bits do not depend on what runs beside it. Where parts begin follows from the position alone; a sum
// goes over keys in rising order, tile by tile; a key that a row does not see adds exactly nothing to it.
//
// keys [kv_heads, slots, D] and values [kv_heads, slots, DV] are pools of T, or of uint where BITS says how they are
// packed: words, then the groups' scales, then their biases (mlxspec/kernels/packed.py). Row r of a threadgroup is
// row r / GQA of the sequence in head r % GQA of those that share K and V. A tile of 8 x 8 values lies in a
// SIMD-group as simdgroup_matrix has it: a lane holds two columns, from `pair` on, of `row`.
// seats [B, 8] of int: first position, first row, rows, first part, first block in the table.
#include <metal_stdlib>
using namespace metal;

constant constexpr int PAGED_KEYS = 32;               // of a tile, one for each lane
constant constexpr int PAGED_PITCH = PAGED_KEYS + 4;  // of a row of scores: four more keep lanes off each other
constant constexpr int PAGED_SEAT = 8;
constant constexpr float PAGED_LOW = -3e38f;  // no score is lower; not infinite, which fast math may not honour

// Parts have 256 positions; without a window, and from 4096 on, 1024, or their sums would outweigh K and V.
inline int paged_part(int at, bool even) {
  return even || at < 4096 ? at / 256 : 12 + at / 1024;
}

inline int paged_begin(int part, bool even) {
  return even || part < 16 ? 256 * part : 1024 * (part - 12);
}

// Columns of K or V that are in threadgroup memory at a time, and where the next row of them begins.
template <typename T>
constexpr int paged_columns() {
  return 256 / int(sizeof(T));
}

template <typename T>
constexpr int paged_stride() {
  return paged_columns<T>() + 16 / int(sizeof(T));
}

// sum + a b. Without matrices: lane by lane, over a's columns in rising order.
template <bool MATRIX>
float2 paged_mac(float2 sum, float2 a, float2 b, uint lane) {
  if (MATRIX) {
    simdgroup_float8x8 x, y, z;
    x.thread_elements()[0] = a.x;
    x.thread_elements()[1] = a.y;
    y.thread_elements()[0] = b.x;
    y.thread_elements()[1] = b.y;
    z.thread_elements()[0] = sum.x;
    z.thread_elements()[1] = sum.y;
    simdgroup_multiply_accumulate(z, x, y, z);
    return float2(z.thread_elements()[0], z.thread_elements()[1]);
  }
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    const float2 at = simd_shuffle(a, ushort((lane & 22) | (k & 4) << 1 | (k & 2) >> 1));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float2 with = simd_shuffle(b, ushort(((k + j) & 4) << 2 | ((k + j) & 3) << 1 | (lane & 9)));
      sum = fma(float2(at[j]), with, sum);
    }
  }
  return sum;
}

// Columns c0 to c0 + columns of a tile's keys from `pool`, a head's K or V, to `stage`: as they are.
template <typename T, int DIM, int BITS, int BLOCK, int THREADS>
void paged_stage(
    const device T* pool,
    const device int* table,
    threadgroup T* stage,
    int c0,
    int columns,
    int t0,
    int first,
    int last,
    uint thread_index) {
  const int quads = columns / 4;
  for (int i = int(thread_index); i < PAGED_KEYS * quads; i += THREADS) {
    const int key = i / quads, c = i % quads * 4, at = t0 + key;
    vec<T, 4> values = vec<T, 4>(T(0));
    if (at >= first && at < last) {
      const size_t slot = size_t(table[at / BLOCK]) * BLOCK + at % BLOCK;
      values = *(const device vec<T, 4>*)(pool + slot * DIM + c0 + c);
    }
    *(threadgroup vec<T, 4>*)(stage + key * paged_stride<T>() + c) = values;
  }
}

// The same, unpacked. A scale is read by one lane and handed to those that hold its group's other words.
template <typename T, int DIM, int BITS, int BLOCK, int THREADS>
void paged_stage(
    const device uint* pool,
    const device int* table,
    threadgroup T* stage,
    int c0,
    int columns,
    int t0,
    int first,
    int last,
    uint thread_index) {
  constexpr int PER_WORD = 32 / BITS;
  constexpr int GROUP = DIM % 64 == 0 ? 64 : 32;
  constexpr int WORDS = DIM / PER_WORD, GROUPS = DIM / GROUP;
  constexpr int WIDTH = WORDS + 2 * GROUPS * int(sizeof(T)) / 4;
  constexpr int SHARE = GROUP / PER_WORD;  // words of a group
  const int words = columns / PER_WORD;
  for (int i = int(thread_index); i < PAGED_KEYS * words; i += THREADS) {
    const int key = i / words, word = i % words, at = t0 + key;
    const bool held = at >= first && at < last;
    uint packed = 0;
    float scale = 0, bias = 0;
    if (held) {
      const size_t slot = size_t(table[at / BLOCK]) * BLOCK + at % BLOCK;
      const device uint* of = pool + slot * WIDTH;
      packed = of[c0 / PER_WORD + word];
      if (word % SHARE == 0) {
        const device T* scales = (const device T*)(of + WORDS);
        const int group = c0 / GROUP + word / SHARE;
        scale = float(scales[group]);
        bias = float(scales[GROUPS + group]);
      }
    }
    const ushort owner = ushort(int(thread_index % 32) / SHARE * SHARE);
    scale = simd_shuffle(scale, owner);
    bias = simd_shuffle(bias, owner);
    threadgroup T* to = stage + key * paged_stride<T>() + word * PER_WORD;
#pragma unroll
    for (int j = 0; j < PER_WORD; j++) {
      to[j] = T(fma(scale, float((packed >> (BITS * j)) & ((1u << BITS) - 1)), bias));
    }
  }
}

// A threadgroup of SIMDS SIMD-groups: one part of one sequence's context, for 8 * TILES / GQA of its rows.
// group: the part, the head of K and V and the rows, the sequence. For the tiles' products the SIMD-groups share
// the results, never a sum. `stage` has PAGED_KEYS * paged_stride<T>(), `scores` 8 * TILES * PAGED_PITCH and
// `shrink` 8 * TILES values. sums [rows, heads, parts, DV], stats [rows, heads, parts, 2]: largest score, total.
template <typename T, int D, int DV, int BITS, int GQA, int TILES, int SIMDS, int BLOCK, int WINDOW, bool MATRIX, typename P>
void paged_attention(
    const device T* q,
    const device P* keys,
    const device P* values,
    const device int* seats,
    const device int* tables,
    device float* sums,
    device float* stats,
    float scale,
    int kv_heads,
    size_t kv_pool,
    size_t v_pool,
    int table_width,
    int parts,
    threadgroup T* stage,
    threadgroup float* scores,
    threadgroup float* shrink,
    uint3 group,
    uint simd,
    uint lane) {
  constexpr int COLUMNS = paged_columns<T>(), STRIDE = paged_stride<T>();
  constexpr int CHUNKS = (DV + COLUMNS - 1) / COLUMNS;
  constexpr int WIDEST = DV < COLUMNS ? DV : COLUMNS;
  constexpr int MINE = (WIDEST / 8 + SIMDS - 1) / SIMDS;  // tiles of 8 columns of a chunk that a SIMD-group sums
  constexpr int QK_STEP = SIMDS / 4;
  constexpr int QK_TILES = (TILES + QK_STEP - 1) / QK_STEP;
  constexpr int ROWS = 8 * TILES / GQA;
  const int row = int((lane & 16) >> 2 | (lane & 6) >> 1);
  const int pair = int((lane & 8) >> 1 | (lane & 1) << 1);
  const uint thread_index = 32 * simd + lane;

  const device int* seat = seats + PAGED_SEAT * group.z;
  const int head = int(group.y) % kv_heads;
  const int row0 = int(group.y) / kv_heads * ROWS;
  const int rows = min(ROWS, seat[2] - row0);
  const int start = seat[0] + row0;
  const int part = int(group.x) + seat[3];
  const int low = WINDOW > 0 ? max(0, start - WINDOW + 1) : 0;
  const int first = max(low, paged_begin(part, WINDOW > 0));
  const int last = min(start + rows, paged_begin(part + 1, WINDOW > 0));
  if (rows <= 0 || first >= last) {
    return;
  }
  const int count = rows * GQA;
  const int tiles = (count + 7) / 8;
  const int heads = kv_heads * GQA;
  const device T* queries = q + (size_t(seat[1] + row0) * heads + head * GQA) * D;
  const device P* k_head = keys + head * kv_pool;
  const device P* v_head = values + head * v_pool;
  const device int* table = tables + size_t(table_width) * group.z - seat[4];

  int q_at[QK_TILES];  // rows that do not exist take the last one's place
#pragma unroll
  for (int n = 0; n < QK_TILES; n++) {
    const int r = min(8 * (int(simd) / 4 + n * QK_STEP) + row, count - 1);
    q_at[n] = (r / GQA * heads + r % GQA) * D + pair;
  }
  float2 out[CHUNKS][MINE][TILES] = {};
  float top = PAGED_LOW, total = 0;  // of row simd + SIMDS * lane
  for (int t0 = first / PAGED_KEYS * PAGED_KEYS; t0 < last; t0 += PAGED_KEYS) {
    float2 dots[QK_TILES] = {};
    for (int c0 = 0; c0 < D; c0 += COLUMNS) {
      const int columns = min(COLUMNS, D - c0);
      if (c0 > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      paged_stage<T, D, BITS, BLOCK, 32 * SIMDS>(k_head, table, stage, c0, columns, t0, first, last, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const threadgroup T* k = stage + (8 * (int(simd) % 4) + pair) * STRIDE + row;
      for (int d = 0; d < columns; d += 8) {
        const float2 b = float2(float(k[d]), float(k[STRIDE + d]));
#pragma unroll
        for (int n = 0; n < QK_TILES; n++) {
          if (int(simd) / 4 + n * QK_STEP < tiles) {
            const device T* at = queries + q_at[n] + c0 + d;
            dots[n] = paged_mac<MATRIX>(dots[n], float2(float(at[0]), float(at[1])), b, lane);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < QK_TILES; n++) {
      const int tile = int(simd) / 4 + n * QK_STEP;
      if (tile < tiles) {
        threadgroup float* to = scores + (8 * tile + row) * PAGED_PITCH + 8 * (int(simd) % 4) + pair;
        to[0] = dots[n].x * scale;
        to[1] = dots[n].y * scale;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    paged_stage<T, DV, BITS, BLOCK, 32 * SIMDS>(
        v_head, table, stage, 0, min(COLUMNS, DV), t0, first, last, thread_index);
    for (int r = int(simd); r < 8 * tiles; r += SIMDS) {
      const int pos = start + r / GQA, at = t0 + int(lane);
      const bool seen = r < count && at <= pos && (WINDOW == 0 || at > pos - WINDOW);
      const float score = seen ? scores[r * PAGED_PITCH + lane] : PAGED_LOW;
      const ushort owner = ushort(r / SIMDS);
      const float before = simd_shuffle(top, owner);
      const float now = max(before, simd_max(score));
      const float weight = seen ? exp2(score - now) : 0.0f;
      const float less = exp2(before - now);
      const float sum = simd_sum(weight);
      scores[r * PAGED_PITCH + lane] = weight;
      if (lane == 0) {
        shrink[r] = less;
      }
      if (lane == owner) {
        top = now;
        total = fma(total, less, sum);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      if (n < tiles) {
        const float less = shrink[8 * n + row];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
          for (int m = 0; m < MINE; m++) {
            out[chunk][m][n] *= less;
          }
        }
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const int columns = min(COLUMNS, DV - chunk * COLUMNS);
      if (chunk > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        paged_stage<T, DV, BITS, BLOCK, 32 * SIMDS>(
            v_head, table, stage, chunk * COLUMNS, columns, t0, first, last, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      for (int key = 0; key < PAGED_KEYS; key += 8) {
        const threadgroup T* v = stage + (key + row) * STRIDE + pair;
        float2 b[MINE] = {};
#pragma unroll
        for (int m = 0; m < MINE; m++) {
          const int c = 8 * (m * SIMDS + int(simd));
          if (c < columns) {
            b[m] = float2(float(v[c]), float(v[c + 1]));
          }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          if (n < tiles) {
            const threadgroup float* of = scores + (8 * n + row) * PAGED_PITCH + key + pair;
            const float2 a = float2(of[0], of[1]);
#pragma unroll
            for (int m = 0; m < MINE; m++) {
              if (8 * (m * SIMDS + int(simd)) < columns) {
                out[chunk][m][n] = paged_mac<MATRIX>(out[chunk][m][n], a, b[m], lane);
              }
            }
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const size_t place = size_t(seat[1] + row0) * heads + head * GQA;
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const int r = 8 * n + row;
    if (r < count) {
      device float* to = sums + ((place + r / GQA * heads + r % GQA) * parts + group.x) * DV + pair;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
          const int c = 8 * (m * SIMDS + int(simd));
          if (c < min(COLUMNS, DV - chunk * COLUMNS)) {
            to[chunk * COLUMNS + c] = out[chunk][m][n].x;
            to[chunk * COLUMNS + c + 1] = out[chunk][m][n].y;
          }
        }
      }
    }
  }
  const int r = int(simd) + SIMDS * int(lane);
  if (r < count) {
    device float* to = stats + ((place + r / GQA * heads + r % GQA) * parts + group.x) * 2;
    to[0] = top;
    to[1] = total;
  }
}

// One value of out [rows, heads, DV]: the parts that its row sees, in rising order. at: the column, the row of the
// sequence and the head, the sequence. `sinks` [heads] are logits without a value, in any address space.
template <typename T, int DV, int WINDOW, bool SINKS, typename L>
void paged_merge(
    const device float* sums,
    const device float* stats,
    const device int* seats,
    L sinks,
    device T* out,
    int heads,
    int parts,
    uint3 at) {
  const device int* seat = seats + PAGED_SEAT * at.z;
  const int head = int(at.y) % heads;
  const int row = int(at.y) / heads;
  if (row >= seat[2]) {
    return;
  }
  const int pos = seat[0] + row;
  const int first = paged_part(WINDOW > 0 ? max(0, pos - WINDOW + 1) : 0, WINDOW > 0) - seat[3];
  const int last = paged_part(pos, WINDOW > 0) - seat[3];
  const size_t place = size_t(seat[1] + row) * heads + head;
  const device float* of = stats + place * parts * 2;
  const float sink = SINKS ? float(sinks[head]) * M_LOG2E_F : PAGED_LOW;
  float top = sink;
  for (int p = first; p <= last; p++) {
    top = max(top, of[2 * p]);
  }
  float total = SINKS ? exp2(sink - top) : 0.0f, sum = 0;
  for (int p = first; p <= last; p++) {
    const float share = exp2(of[2 * p] - top);
    total = fma(of[2 * p + 1], share, total);
    sum = fma(sums[(place * parts + p) * DV + at.x], share, sum);
  }
  out[place * DV + at.x] = T(sum / total);
}
