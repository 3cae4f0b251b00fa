// tokens [R] of logits [R, vocab] and the number of accepted drafts; each logit is read once, no noise is stored.
//
// Rule: MLX's own noise and arithmetic, operation by operation, so that the tokens are the same. Values are ordered as
// integers, equal ones by the lower token: neither the parts of the vocabulary nor other rows can change the maximum.
//
// A row in which a logit that its mask allows is NaN or +inf gets the token -1, and so does one without a mask in which
// all are -inf.
//
// A row has 8 words of `params`: seed, position, the bits of the temperature (0: greedy), whether it has a mask,
// whether `shift` is added to the position, whether its `min_logits` counts, and two unused ones.
#include <metal_stdlib>
using namespace metal;

constant constexpr float SAMPLE_MAX_GUMBEL = 17.0f;   // above any noise, the highest being -log(-log(1 - 2^-24)) = 16.64
// In the order of values: -inf, and what is cut or masked; a logit that is -inf where there is no mask; one that is NaN
// or +inf.
constant constexpr uint SAMPLE_LOWEST = 0x007fffffu, SAMPLE_NONE = SAMPLE_LOWEST - 1, SAMPLE_BROKEN = ~0u;
constant constexpr uint SAMPLE_ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};

// Threefry-2x32 of 20 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011).
inline uint2 sample_threefry(uint2 key, uint2 count) {
  const uint keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDAu};
  uint a = count.x + keys[0], b = count.y + keys[1];
#pragma unroll
  for (uint i = 0; i < 5; i++) {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      const uint by = SAMPLE_ROTATIONS[i % 2][j];
      a += b;
      b = (b << by | b >> (32 - by)) ^ a;
    }
    a += keys[(i + 1) % 3];
    b += keys[(i + 2) % 3] + i + 1;
  }
  return uint2(a, b);
}

// The random bits of tokens i and i + pairs, where pairs = ceil(vocab / 2); of an odd vocab the last i has no partner.
inline uint2 sample_bits(uint2 key, uint i, uint pairs, uint vocab) {
  return sample_threefry(key, uint2(i, i + pairs < vocab ? i + pairs : 0));
}

// A number in [0, 1): bits from 2^32 - 128 on, which round to 1, give the largest number below 1.
inline float sample_uniform(uint bits) {
  return min(float(bits) * 2.3283064365386963e-10f, 0.99999994f);
}

inline float sample_gumbel(uint bits) {
  return -precise::log(-precise::log(sample_uniform(bits)));
}

// An integer above 0 in the order of floats; both zeros are equal, and a NaN is as low as -inf.
inline uint sample_order(float value) {
  const uint bits = as_type<uint>(isnan(value) ? -INFINITY : value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One SIMD-group takes PAIRS pairs of tokens of a row; one hash gives the noise of both tokens of a pair.
// part_max[row, part] is the largest sample_order, part_argmax[row, part] its token.
// `min_logits` of float and `shift` of uint, [rows], lie in device memory or, if short, in constant.
template <uint PAIRS, typename T, typename F, typename S>
void sample_accept_part(
    const device T* logits,
    const device uint* params,
    const device uint8_t* masks,
    F min_logits,
    S shift,
    device uint* part_max,
    device uint* part_argmax,
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
  const device uint* param = params + 8 * row;
  const float temperature = as_type<float>(param[2]);
  const bool masked = param[3] != 0;
  const device uint8_t* mask = masks + (masked ? size_t(row) * mask_bytes : 0);
  const uint2 key = uint2(param[0], param[1] + (param[4] ? shift[row] : 0));
  const float min_logit = param[5] ? min_logits[row] : -INFINITY;
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
      const uint exact = as_type<uint>(value);
      const bool finite = (exact & 0x7f800000u) != 0x7f800000u;  // by its bits: fast math takes all for finite
      if (finite && temperature > 0) {
        value = value / temperature;
        if (value < min_logit) {
          value = -INFINITY;
        }
        if (sample_order(value + SAMPLE_MAX_GUMBEL) < high) {
          continue;
        }
        if (!hashed) {
          bits = sample_bits(key, i, pairs, vocab);
          hashed = true;
        }
        value = value + sample_gumbel(side ? bits.y : bits.x);
      }
      uint order = sample_order(value);
      if (!finite) {
        order = exact != 0xff800000u ? SAMPLE_BROKEN : masked ? SAMPLE_LOWEST : SAMPLE_NONE;
      }
      if (order > high || (order == high && t < at)) {
        high = order;
        at = t;
      }
    }
  }
  const uint most = simd_max(high);
  const uint first = simd_min(high == most ? at : ~0u);
  if (lane == 0) {
    part_max[row * parts + part] = most;
    part_argmax[row * parts + part] = first;
  }
}

// One SIMD-group finds the tokens of an entry's rows and how many of its drafted tokens equal the sample of the row
// before them. An entry is 4 words: first row, rows, the first index of its draft in `inputs`, and an unused one.
// `entries` and `inputs` of int lie in device memory or, if short, in constant.
template <typename E, typename I>
void sample_accept_merge(
    const device uint* part_max,
    const device uint* part_argmax,
    E entries,
    I inputs,
    device int* tokens,
    device int* accepted,
    uint parts,
    uint entry,
    uint lane) {
  const int first = entries[4 * entry], rows = entries[4 * entry + 1];
  const I draft = inputs + entries[4 * entry + 2];
  int count = 0;
  for (int r = 0; r < rows; r++) {
    const size_t row = size_t(first + r) * parts;
    uint high = 0, at = 0;
    for (uint p = lane; p < parts; p += 32) {
      const uint order = part_max[row + p], t = part_argmax[row + p];
      if (order > high || (order == high && t < at)) {
        high = order;
        at = t;
      }
    }
    const uint most = simd_max(high);
    int chosen = int(simd_min(high == most ? at : ~0u));
    if (most == SAMPLE_BROKEN || most == SAMPLE_NONE) {
      chosen = -1;
    } else if (most == SAMPLE_LOWEST) {
      chosen = 0;
    }
    if (lane == 0) {
      tokens[first + r] = chosen;
    }
    if (count == r && r + 1 < rows && draft[r] == chosen && chosen >= 0) {
      count++;
    }
  }
  if (lane == 0) {
    accepted[entry] = count;
  }
}
