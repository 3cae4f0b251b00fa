// tokens[R] of logits [R, vocab] and how many drafted ones stand, each logit read once and no noise stored.
//
// Rule: MLX's own noise and MLX's own arithmetic, operation by operation, so that the same token comes. What is
// best is a total order of integers (value, then the lower token): no split and no neighbour can change it.
//
// A row's `how` is 8 words: seed, position, temperature's bits (0: greedy), its mask's number from 1 on (0: all
// may come), whether `late` is added to the position, whether its floor counts, and two that are not used.
#include <metal_stdlib>
using namespace metal;

constant constexpr float DRAW_MOST = 17.0f;   // above any noise, the highest being -log(-log(1 - 2^-24)) = 16.64
constant constexpr uint DRAW_ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};

// Threefry-2x32 of 20 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011).
inline uint2 draw_hash(uint2 key, uint2 count) {
  const uint keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDAu};
  uint a = count.x + keys[0], b = count.y + keys[1];
#pragma unroll
  for (uint i = 0; i < 5; i++) {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      const uint by = DRAW_ROTATIONS[i % 2][j];
      a += b;
      b = (b << by | b >> (32 - by)) ^ a;
    }
    a += keys[(i + 1) % 3];
    b += keys[(i + 2) % 3] + i + 1;
  }
  return uint2(a, b);
}

// The bits of tokens i and i + pairs, where pairs = ceil(vocab / 2); of an odd vocab the last i has no partner.
inline uint2 draw_bits(uint2 key, uint i, uint pairs, uint vocab) {
  return draw_hash(key, uint2(i, i + pairs < vocab ? i + pairs : 0));
}

// A number of [0, 1). What 2^32 - 128 and more round to, 1, is not in it.
inline float draw_uniform(uint bits) {
  return min(float(bits) * 2.3283064365386963e-10f, 0.99999994f);
}

inline float draw_noise(uint bits) {
  return -precise::log(-precise::log(draw_uniform(bits)));
}

// Floats in their order, above 0, equal for both zeros; a NaN is as low as -inf, so that it never beats a number.
inline uint draw_order(float value) {
  const uint bits = as_type<uint>(isnan(value) ? -INFINITY : value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One SIMD-group finds the best of its PAIRS pairs of a row, of which one hash makes both noises: best[row, part]
// is its order, token[row, part] itself.
template <uint PAIRS, typename T>
void sample_accept_part(
    const device T* logits,
    const device uint* hows,
    const device uint8_t* masks,
    const device float* floors,
    const device uint* late,
    device uint* best,
    device uint* token,
    uint vocab,
    uint mask_bytes,
    uint row,
    uint part,
    uint parts,
    uint lane) {
  if (part >= parts) {
    return;
  }
  const device T* x = logits + size_t(row) * vocab;
  const device uint* how = hows + 8 * row;
  const float temperature = as_type<float>(how[2]);
  const bool masked = how[3] != 0;
  const device uint8_t* mask = masks + (masked ? size_t(how[3] - 1) * mask_bytes : 0);
  const uint2 key = uint2(how[0], how[1] + (how[4] ? late[row] : 0));
  const float least = how[5] ? floors[row] : -INFINITY;
  const uint pairs = (vocab + 1) / 2;
  uint high = 0, at = 0;
  for (uint i = part * PAIRS + lane; i < min(pairs, (part + 1) * PAIRS); i += 32) {
    uint2 bits = uint2(0, 0);
    bool hashed = false;
#pragma unroll
    for (uint side = 0; side < 2; side++) {
      const uint t = i + side * pairs;
      if (t >= vocab) {
        break;
      }
      float value = -INFINITY;
      if (!masked || (mask[t >> 3] >> (t & 7) & 1)) {
        value = float(x[t]);
      }
      if (temperature > 0) {
        value = value / temperature;
        if (value < least) {
          value = -INFINITY;
        }
        if (draw_order(value + DRAW_MOST) < high) {
          continue;
        }
        if (!hashed) {
          bits = draw_bits(key, i, pairs, vocab);
          hashed = true;
        }
        value = value + draw_noise(side ? bits.y : bits.x);
      }
      const uint order = draw_order(value);
      if (order > high || (order == high && t < at)) {
        high = order;
        at = t;
      }
    }
  }
  const uint most = simd_max(high);
  const uint first = simd_min(high == most ? at : ~0u);
  if (lane == 0) {
    best[row * parts + part] = most;
    token[row * parts + part] = first;
  }
}

// One SIMD-group finds the tokens of an entry's rows and how many of its drafted tokens equal the sample before
// them. An entry is 4 words: its first row, its rows, where its draft begins in `inputs`, and one not used.
inline void sample_accept_merge(
    const device uint* best,
    const device uint* token,
    const device int* entries,
    const device int* inputs,
    device int* tokens,
    device int* kept,
    uint parts,
    uint entry,
    uint lane) {
  const int first = entries[4 * entry], rows = entries[4 * entry + 1];
  const device int* draft = inputs + entries[4 * entry + 2];
  int stands = 0;
  for (int r = 0; r < rows; r++) {
    const size_t row = size_t(first + r) * parts;
    uint high = 0, at = 0;
    for (uint p = lane; p < parts; p += 32) {
      const uint order = best[row + p], t = token[row + p];
      if (order > high || (order == high && t < at)) {
        high = order;
        at = t;
      }
    }
    const uint most = simd_max(high);
    const int chosen = int(simd_min(high == most ? at : ~0u));
    if (lane == 0) {
      tokens[first + r] = chosen;
    }
    if (stands == r && r + 1 < rows && draft[r] == chosen) {
      stands++;
    }
  }
  if (lane == 0) {
    kept[entry] = stands;
  }
}
