// Weights of few-row products, as a lane of a SIMD-group reads them: quantized in each format of mx.quantize, or
// not at all. Every word is read once.
#include <metal_stdlib>
using namespace metal;

constant constexpr int QMM_RUN = 8;               // values of a column that a lane holds at once
constant constexpr int QMM_SPAN = 32 * QMM_RUN;   // values of a column that a SIMD-group holds at once

// FORMAT. Affine: a code is an integer, scale and bias are floats. Else a code of 4 bits is a float of 2 bits of
// exponent and one of mantissa, one of 8 bits has 4 and 3; a scale is a power of two, or such a float of 8 bits.
constant constexpr int QMM_AFFINE = 0, QMM_POWERS = 1, QMM_FLOATS = 2;

// OCP's E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; each table digit is twice a magnitude.
inline float qmm_e2m1(uint code) {
  const float magnitude = 0.5f * float((0xC8643210u >> (4 * (code & 7u))) & 15u);
  return (code & 8u) ? -magnitude : magnitude;
}

// OCP's E4M3: the largest code is no number.
inline float qmm_e4m3(uint code) {
  const uint digits = code & 127u;
  if (digits == 127u) {
    return NAN;
  }
  const float magnitude = digits < 8u ? float(digits) * 0.001953125f : as_type<float>((digits + 960u) << 20);
  return (code & 128u) ? -magnitude : magnitude;
}

template <int FORMAT, typename S>
float qmm_scale(S scale) {
  if (FORMAT == QMM_POWERS) {
    const uint exponent = uint(scale);
    return as_type<float>(exponent > 0u ? exponent << 23 : 0x400000u);
  }
  return FORMAT == QMM_FLOATS ? qmm_e4m3(uint(scale)) : float(scale);
}

// Values of a column: those of its run number `run`, which are the next BITS bytes for each run.
template <int BITS, int FORMAT>
void qmm_unpack(const device uint* column, int run, float scale, float bias, thread float* values) {
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
    if (FORMAT == QMM_AFFINE) {
      values[i] = fma(scale, float(codes[i]), bias);
    } else {
      values[i] = scale * (BITS == 4 ? qmm_e2m1(codes[i]) : qmm_e4m3(codes[i]));
    }
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
