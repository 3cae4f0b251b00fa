// softmax(scale * q k^T) v over block tables, for few rows per sequence. All rows of a sequence and all heads that
// share K and V read them once. paged_attention computes the sums of a part of the context, paged_merge joins them.
//
// Rule: a row's bits do not depend on what runs beside it. Where parts begin follows from the position alone; a sum
// goes over keys in rising order, tile by tile; a key that a row does not see adds exactly nothing to it. So values
// of V that are not finite count as 0 for every row: 0 times them would reach rows that do not see them.
//
// keys [kv_heads, slots, D] and values [kv_heads, slots, DV] are pools of T, or of uint where BITS is not 0: words,
// then the groups' scales, then their biases (mlxspec/kernels/quantized_kv.py). Row r of a threadgroup is row r / GQA
// of the sequence in head r % GQA of those that share K and V. A tile of 8 x 8 values lies in a SIMD-group as in
// simdgroup_matrix: a lane holds two columns, from `pair` on, of `row`. sequences [B, 8] of int: first position,
// first row, rows, first part, first block in the table, first position that is seen.
#include <metal_stdlib>
using namespace metal;

constant constexpr int PAGED_KEYS = 32;               // of a tile, one for each lane
constant constexpr int PAGED_PITCH = PAGED_KEYS + 4;  // of a row of scores: four more keep lanes off each other
constant constexpr int PAGED_SEQUENCE = 8;
constant constexpr float PAGED_LOW = -3e38f;  // no score is lower; not infinite, which fast math may not honour

// Positions of a part from `at` on. A part is a threadgroup's work for each head of K and V: one sequence is to keep
// 10 to 80 cores busy, so the longest part is a fourth of 512 positions, an eighth of 2048, a sixteenth of 8192. But
// each part leaves sums, written and read: for 5 rows and 8 heads, of 128 values in 16 bits, 0.63 of the bytes of K and V
// at 512 and 0.40 at 2048, where caches hold both and idle cores cost more; 0.22 at 8192 and 0.11 at 32768.
inline int paged_length(int at) {
  return at < 512 ? 128 : at < 2048 ? 256 : at < 8192 ? 512 : 1024;
}

// With a window, all are as long as is right for its width.
template <int WINDOW>
int paged_part(int at) {
  const int length = paged_length(WINDOW > 0 ? WINDOW : at);
  return at / length + (WINDOW > 0 ? 0 : length / 64 - 2);
}

template <int WINDOW>
int paged_begin(int part) {
  const int length = WINDOW > 0 ? paged_length(WINDOW) : part < 4 ? 128 : part < 10 ? 256 : part < 22 ? 512 : 1024;
  return (part - (WINDOW > 0 ? 0 : length / 64 - 2)) * length;
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

// sum + a b.
inline float2 paged_mac(float2 sum, float2 a, float2 b) {
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

// x, or 0 for what is not finite: told by its bits, since fast math takes all for finite.
template <typename T>
T paged_finite(T x) {
  return (as_type<uint>(float(x)) & 0x7f800000u) == 0x7f800000u ? T(0) : x;
}

// Loads columns c0 to c0 + columns of the keys from t0 on of a head's pool; with FINITE, 0 for what is not finite.
template <typename T, int DIM, int BITS, int BLOCK, int THREADS, bool FINITE>
void paged_load(
    const device T* pool, const device int* table, threadgroup T* tile,
    int c0, int columns, int t0, int first, int last, uint thread_index) {
  const int quads = columns / 4;
  for (int i = int(thread_index); i < PAGED_KEYS * quads; i += THREADS) {
    const int key = i / quads, c = i % quads * 4, at = t0 + key;
    vec<T, 4> values = vec<T, 4>(T(0));
    if (at >= first && at < last) {
      const size_t slot = size_t(table[at / BLOCK]) * BLOCK + at % BLOCK;
      values = *(const device vec<T, 4>*)(pool + slot * DIM + c0 + c);
      if (FINITE) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          values[j] = paged_finite<T>(values[j]);
        }
      }
    }
    *(threadgroup vec<T, 4>*)(tile + key * paged_stride<T>() + c) = values;
  }
}

// The same for packed values. A scale is read by one lane and shuffled to those with its group's other words.
template <typename T, int DIM, int BITS, int BLOCK, int THREADS, bool FINITE>
void paged_load(
    const device uint* pool, const device int* table, threadgroup T* tile,
    int c0, int columns, int t0, int first, int last, uint thread_index) {
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
        const device T* scales = (const device T*)(of + WORDS) + c0 / GROUP + word / SHARE;
        scale = float(scales[0]);
        bias = float(scales[GROUPS]);
      }
    }
    const ushort owner = ushort(int(thread_index % 32) / SHARE * SHARE);
    scale = simd_shuffle(scale, owner);
    bias = simd_shuffle(bias, owner);
    threadgroup T* to = tile + key * paged_stride<T>() + word * PER_WORD;
#pragma unroll
    for (int j = 0; j < PER_WORD; j++) {
      const T value = T(fma(scale, float((packed >> (BITS * j)) & ((1u << BITS) - 1)), bias));
      to[j] = FINITE ? paged_finite<T>(value) : value;
    }
  }
}

// A threadgroup of SIMDS SIMD-groups: one part of one sequence's context, for 8 * TILES / GQA of its rows.
// group: the part, the head of K and V and the rows, the sequence. For the tiles' products the SIMD-groups share
// the results, never a sum; for scores, each has tiles of rows, so that what it needs of q stays in its registers
// where these suffice (else it is read again for each tile of keys). `tile` has PAGED_KEYS * paged_stride<T>(),
// `scores` 8 * TILES * PAGED_PITCH and `rescale` 8 * TILES values. sums [rows, heads, parts, DV], stats [rows, heads,
// parts, 2]: largest score, total.
template <typename T, int D, int DV, int BITS, int GQA, int TILES, int SIMDS, int BLOCK, int WINDOW, typename P>
void paged_attention(
    const device T* q, const device P* keys, const device P* values,
    const device int* sequences, const device int* tables,
    device float* sums, device float* stats,
    float scale, int kv_heads, size_t kv_pool, size_t v_pool, int table_width, int parts,
    threadgroup T* tile, threadgroup float* scores, threadgroup float* rescale,
    uint3 group, uint simd, uint lane) {
  constexpr int COLUMNS = paged_columns<T>(), STRIDE = paged_stride<T>();
  constexpr int CHUNKS = (DV + COLUMNS - 1) / COLUMNS;
  constexpr int WIDEST = DV < COLUMNS ? DV : COLUMNS;
  constexpr int MINE = (WIDEST / 8 + SIMDS - 1) / SIMDS;  // tiles of 8 columns of a chunk that a SIMD-group sums
  constexpr int BANDS = TILES < SIMDS ? TILES : SIMDS;  // of tiles of rows; SIMD-groups of one share the keys
  constexpr int BAND = TILES / BANDS, KEYS_STEP = 8 * (SIMDS / BANDS);
  constexpr int WORDS = BAND * (D / 8) * int(sizeof(T)) / 2 + CHUNKS * MINE * TILES * 2;
  constexpr bool HELD = WORDS <= 96;  // of the 128 registers that a thread has
  constexpr int ROWS = 8 * TILES / GQA;
  const int row = int((lane & 16) >> 2 | (lane & 6) >> 1);
  const int pair = int((lane & 8) >> 1 | (lane & 1) << 1);
  const uint thread_index = 32 * simd + lane;

  const device int* sequence = sequences + PAGED_SEQUENCE * group.z;
  const int head = int(group.y) % kv_heads;
  const int row0 = int(group.y) / kv_heads * ROWS;
  const int rows = min(ROWS, sequence[2] - row0);
  const int start = sequence[0] + row0;
  const int part = int(group.x) + sequence[3];
  const int low = WINDOW > 0 ? max(sequence[5], start - WINDOW + 1) : sequence[5];
  const int first = max(low, paged_begin<WINDOW>(part));
  const int last = min(start + rows, paged_begin<WINDOW>(part + 1));
  if (rows <= 0 || first >= last) {
    return;
  }
  const int count = rows * GQA;
  const int tiles = (count + 7) / 8;
  const int heads = kv_heads * GQA;
  const size_t of = size_t(sequence[1] + row0) * heads + head * GQA;
  const device P* k_head = keys + head * kv_pool;
  const device P* v_head = values + head * v_pool;
  const device int* table = tables + size_t(table_width) * group.z - sequence[4];

  const int band = int(simd) % BANDS;
  const device T* queries[BAND];  // rows that do not exist take the last one's place
  vec<T, 2> held[HELD ? BAND : 1][HELD ? D / 8 : 1];
#pragma unroll
  for (int n = 0; n < BAND; n++) {
    const int r = min(8 * (band + n * BANDS) + row, count - 1);
    queries[n] = q + (of + r / GQA * heads + r % GQA) * D + pair;
    if (HELD) {
#pragma unroll
      for (int d = 0; d < D / 8; d++) {
        held[n][d] = *(const device vec<T, 2>*)(queries[n] + 8 * d);
      }
    }
  }
  float2 out[CHUNKS][MINE][TILES] = {};
  float top = PAGED_LOW, total = 0;  // of row simd + SIMDS * lane
  for (int t0 = first / PAGED_KEYS * PAGED_KEYS; t0 < last; t0 += PAGED_KEYS) {
#pragma unroll
    for (int c0 = 0; c0 < D; c0 += COLUMNS) {
      const int columns = min(COLUMNS, D - c0);
      if (c0 > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      paged_load<T, D, BITS, BLOCK, 32 * SIMDS, false>(
          k_head, table, tile, c0, columns, t0, first, last, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int key = 8 * (int(simd) / BANDS); key < PAGED_KEYS; key += KEYS_STEP) {
        const threadgroup T* k = tile + (key + pair) * STRIDE + row;
        threadgroup float* to = scores + (8 * band + row) * PAGED_PITCH + key + pair;
        float2 dots[BAND] = {};
#pragma unroll
        for (int n = 0; n < BAND; n++) {
          if (c0 > 0 && band + n * BANDS < tiles) {
            dots[n] = float2(to[8 * n * BANDS * PAGED_PITCH], to[8 * n * BANDS * PAGED_PITCH + 1]);
          }
        }
#pragma unroll
        for (int d = 0; d < columns; d += 8) {
          const float2 b = float2(float(k[d]), float(k[STRIDE + d]));
#pragma unroll
          for (int n = 0; n < BAND; n++) {
            if (band + n * BANDS < tiles) {
              vec<T, 2> a;  // not by ?:, whose operands would lie in two address spaces
              if (HELD) {
                a = held[n][(c0 + d) / 8];
              } else {
                a = *(const device vec<T, 2>*)(queries[n] + c0 + d);
              }
              dots[n] = paged_mac(dots[n], float2(float(a.x), float(a.y)), b);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < BAND; n++) {
          if (band + n * BANDS < tiles) {
            to[8 * n * BANDS * PAGED_PITCH] = dots[n].x;
            to[8 * n * BANDS * PAGED_PITCH + 1] = dots[n].y;
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    paged_load<T, DV, BITS, BLOCK, 32 * SIMDS, true>(
        v_head, table, tile, 0, min(COLUMNS, DV), t0, first, last, thread_index);
    for (int r = int(simd); r < 8 * tiles; r += SIMDS) {
      const int pos = start + r / GQA, at = t0 + int(lane);
      const bool seen = r < count && at >= first && at <= pos && (WINDOW == 0 || at > pos - WINDOW);
      const float score = seen ? scores[r * PAGED_PITCH + lane] * scale : PAGED_LOW;
      const ushort owner = ushort(r / SIMDS);
      const float before = simd_shuffle(top, owner);
      const float now = max(before, simd_max(score));
      const float weight = seen ? exp2(score - now) : 0.0f;
      const float less = exp2(before - now);
      const float sum = simd_sum(weight);
      scores[r * PAGED_PITCH + lane] = weight;
      if (lane == 0) {
        rescale[r] = less;
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
        const float less = rescale[8 * n + row];
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
        paged_load<T, DV, BITS, BLOCK, 32 * SIMDS, true>(
            v_head, table, tile, chunk * COLUMNS, columns, t0, first, last, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      for (int key = 0; key < PAGED_KEYS; key += 8) {
        const threadgroup T* v = tile + (key + row) * STRIDE + pair;
        float2 b[MINE];
#pragma unroll
        for (int m = 0; m < MINE; m++) {
          const int c = 8 * (m * SIMDS + int(simd));
          b[m] = c < columns ? float2(float(v[c]), float(v[c + 1])) : float2(0.0f);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          if (n < tiles) {
            const threadgroup float* of = scores + (8 * n + row) * PAGED_PITCH + key + pair;
            const float2 a = float2(of[0], of[1]);
#pragma unroll
            for (int m = 0; m < MINE; m++) {
              if (8 * (m * SIMDS + int(simd)) < columns) {
                out[chunk][m][n] = paged_mac(out[chunk][m][n], a, b[m]);
              }
            }
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const int r = 8 * n + row;
    if (r < count) {
      device float* to = sums + ((of + r / GQA * heads + r % GQA) * parts + group.x) * DV + pair;
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
    device float* to = stats + ((of + r / GQA * heads + r % GQA) * parts + group.x) * 2;
    to[0] = top;
    to[1] = total;
  }
}

// A SIMD-group: a row of out [rows, heads, DV], from the parts that it sees, in rising order, 32 at a time. at: the
// lane, the row of the sequence and the head, the sequence. `sinks` [heads] are logits without a value, in any
// address space.
template <typename T, int DV, int WINDOW, bool SINKS, typename L>
void paged_merge(
    const device float* sums, const device float* stats, const device int* sequences, L sinks,
    device T* out, int heads, int parts, uint3 at) {
  constexpr int SPANS = (DV + 127) / 128;  // a lane has four values of each
  const int lane = int(at.x);
  const device int* sequence = sequences + PAGED_SEQUENCE * at.z;
  const int head = int(at.y) % heads;
  const int row = int(at.y) / heads;
  if (row >= sequence[2]) {
    return;
  }
  const int pos = sequence[0] + row;
  const int first = paged_part<WINDOW>(WINDOW > 0 ? max(sequence[5], pos - WINDOW + 1) : sequence[5]) - sequence[3];
  const int last = paged_part<WINDOW>(pos) - sequence[3];
  const size_t of = size_t(sequence[1] + row) * heads + head;
  float top = SINKS ? float(sinks[head]) * M_LOG2E_F : PAGED_LOW;
  float total = SINKS ? 1.0f : 0.0f;
  float4 sum[SPANS] = {};
  for (int p0 = first; p0 <= last; p0 += 32) {
    const device float2* at_lane = (const device float2*)stats + of * parts + p0 + lane;
    const float2 stat = p0 + lane <= last ? *at_lane : float2(PAGED_LOW, 0.0f);
    const float now = max(top, simd_max(stat.x));
    const float less = exp2(top - now), share = exp2(stat.x - now);
    top = now;
    total *= less;
#pragma unroll
    for (int n = 0; n < SPANS; n++) {
      sum[n] *= less;
    }
    for (int p = p0; p <= min(last, p0 + 31); p++) {
      const float part = simd_shuffle(share, ushort(p - p0));
      total = fma(simd_shuffle(stat.y, ushort(p - p0)), part, total);
#pragma unroll
      for (int n = 0; n < SPANS; n++) {
        const int column = 128 * n + 4 * lane;
        if (column < DV) {
          const float4 value = *(const device float4*)(sums + (of * parts + p) * DV + column);
          sum[n] = fma(value, float4(part), sum[n]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < SPANS; n++) {
    if (128 * n + 4 * lane < DV) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        out[of * DV + 128 * n + 4 * lane + j] = T(sum[n][j] / total);
      }
    }
  }
}
