// Weights of few-row products, as a lane of a SIMD-group reads them: quantized in each format of mx.quantize, or
// not at all. Every word is read once.
#include <metal_stdlib>
using namespace metal;

constant constexpr int QMM_RUN = 8;               // values of a column that a lane holds at once
constant constexpr int QMM_SPAN = 32 * QMM_RUN;   // values of a column that a SIMD-group holds at once

// FORMAT. Affine: a code is an integer, scale and bias are floats. Else a code of 4 bits is a float of 2 bits of
// exponent and one of mantissa, one of 8 bits has 4 and 3; a scale is a power of two, or such a float of 8 bits.
constant constexpr int QMM_AFFINE = 0, QMM_POWERS = 1, QMM_FLOATS = 2;

// OCP's E2M1 (BITS is 4) or E4M3 (8), of which the largest code is no number: code number `at` of each half of a
// word. Its digits are put where a half has them, whose exponents are larger by a bias; a code below the normal ones
// becomes such a half, and all are exact. Two codes take two shifts: these, and conversions of integers, are slow.
template <int BITS>
half2 qmm_floats(uint word, int at) {
  constexpr int DIGITS = BITS == 4 ? 9 : 7;  // bit of a half for the lowest digit
  constexpr uint MASK = ((1u << (BITS - 1)) - 1u) * 0x10001u;
  const int digits = DIGITS - BITS * at, sign = 16 - BITS * (at + 1);  // to the left
  const uint magnitudes = (digits < 0 ? word >> -digits : word << digits) & (MASK << DIGITS);
  const half2 made = as_type<half2>(magnitudes | ((word << sign) & 0x80008000u)) * (BITS == 4 ? 16384.0h : 256.0h);
  return BITS == 4 ? made : select(made, half2(NAN), fabs(made) == half2(480.0h));
}

template <int FORMAT, typename S>
float qmm_scale(S scale) {
  if (FORMAT == QMM_POWERS) {
    const uint exponent = uint(scale);
    return as_type<float>(exponent > 0u ? exponent << 23 : 0x400000u);
  }
  return FORMAT == QMM_FLOATS ? float(qmm_floats<8>(uint(scale), 0)[0]) : float(scale);
}

// Values of a column: those of its run number `run`, which are the next BITS bytes for each run.
template <int BITS, int FORMAT>
void qmm_unpack(const device uint* column, int run, float scale, float bias, thread float* values) {
  if (FORMAT != QMM_AFFINE) {
    constexpr int PAIRS = 16 / BITS;  // of a word
#pragma unroll
    for (int i = 0; i < QMM_RUN; i += 2 * PAIRS) {
      const uint word = column[run * BITS / 4 + i / (2 * PAIRS)];
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const half2 pair = qmm_floats<BITS>(word, j);
        values[i + j] = scale * float(pair[0]);
        values[i + j + PAIRS] = scale * float(pair[1]);
      }
    }
    return;
  }
  uint codes[QMM_RUN];
  if (BITS == 4 || BITS == 8) {
    constexpr int PER_WORD = 32 / BITS;
#pragma unroll
    for (int i = 0; i < QMM_RUN; i += PER_WORD) {
      const uint word = column[run * BITS / 4 + i / PER_WORD];
#pragma unroll
      for (int j = 0; j < PER_WORD; j++) {
        codes[i + j] = (word >> (BITS * j)) & ((1u << BITS) - 1);
      }
    }
  } else {
    const device uchar* bytes = (const device uchar*)column + run * BITS;
    ulong packed = 0;
#pragma unroll
    for (int i = 0; i < BITS; i++) {
      packed |= ulong(bytes[i]) << (8 * i);
    }
#pragma unroll
    for (int i = 0; i < QMM_RUN; i++) {
      codes[i] = uint(packed >> (BITS * i)) & ((1u << BITS) - 1);
    }
  }
#pragma unroll
  for (int i = 0; i < QMM_RUN; i++) {
    values[i] = fma(scale, float(codes[i]), bias);
  }
}

// w [N, K * BITS / 32], scales and, where FORMAT is QMM_AFFINE, biases [N, K / GROUP]: mx.quantize's layout. K is
// a multiple of GROUP and of 32.
template <int BITS, int GROUP, int FORMAT, typename S, typename B>
struct QmmQuantized {
  const device uint* w;
  const device S* scales;
  const device B* biases;
  int K;

  // The weights from this column on.
  QmmQuantized from(size_t column) const {
    const size_t groups = column * (K / GROUP);
    return {w + column * (K / 32 * BITS), scales + groups, biases + groups, K};
  }

  // What lane `lane` holds of column n's span that starts at k0: QMM_RUN values, none past the column's end.
  // All lanes must call this together: a scale is loaded by one of them and handed to those that need it.
  void run(size_t n, int k0, uint lane, thread float* values) const {
    const QmmQuantized column = from(n);
    const int group = k0 / GROUP + int(lane);
    float scale = {}, bias = {};  // of a lane that owns no group, nobody asks for them
    if (int(lane) < QMM_SPAN / GROUP && group < K / GROUP) {
      scale = qmm_scale<FORMAT>(column.scales[group]);
      if (FORMAT == QMM_AFFINE) {
        bias = float(column.biases[group]);
      }
    }
    const ushort owner = ushort(QMM_RUN * lane / GROUP);
    scale = simd_shuffle(scale, owner);
    if (FORMAT == QMM_AFFINE) {
      bias = simd_shuffle(bias, owner);
    }
    const int k = k0 + QMM_RUN * int(lane);
    if (k < K) {
      qmm_unpack<BITS, FORMAT>(column.w, k / QMM_RUN, scale, bias, values);
    }
  }
};

template <int BITS, int GROUP, int FORMAT, typename S, typename B>
QmmQuantized<BITS, GROUP, FORMAT, S, B> qmm_quantized(
    const device uint* w, const device S* scales, const device B* biases, int K) {
  return {w, scales, biases, K};
}

// w [N, K] as they are; K is a multiple of QMM_RUN.
template <typename W>
struct QmmPlain {
  const device W* w;
  int K;

  QmmPlain from(size_t column) const {
    return {w + column * K, K};
  }

  void run(size_t n, int k0, uint lane, thread float* values) const {
    const int k = k0 + QMM_RUN * int(lane);
    if (k < K) {
#pragma unroll
      for (int i = 0; i < QMM_RUN; i++) {
        values[i] = float(w[n * K + k + i]);
      }
    }
  }
};

template <typename W>
QmmPlain<W> qmm_plain(const device W* w, int K) {
  return {w, K};
}
