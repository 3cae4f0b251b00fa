// Arithmetic: fp16 and bf16 are computed in fp32 and rounded once, as each operation on the GPU is.
#pragma once
#include "msim/vector.h"

namespace metal {

extern "C" {
float expf(float);
float exp2f(float);
float exp10f(float);
float logf(float);
float log2f(float);
float log10f(float);
float powf(float, float);
float sinf(float);
float cosf(float);
float tanf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float atan2f(float, float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float fmodf(float, float);
float remainderf(float, float);
float ldexpf(float, int);
float frexpf(float, int*);
float modff(float, float*);
float nextafterf(float, float);
float expm1f(float);
float log1pf(float);
float erff(float);
float fmaf(float, float, float);
}
#define MSIM_M1(name, expr)                                                   \
  MSIM_I float name(float x) { return expr; }                                 \
  MSIM_I half name(half h_) {                                                 \
    float x = h_;                                                             \
    return (half)(expr);                                                      \
  }                                                                           \
  MSIM_I bfloat name(bfloat h_) {                                             \
    float x = h_;                                                             \
    return (bfloat)(expr);                                                    \
  }                                                                           \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                       \
  MSIM_I V name(V v) {                                                        \
    for (int i = 0; i < vtraits<V>::n; i++) v[i] = name(v[i] + elem_t<V>(0)); \
    return v;                                                                 \
  }
#define MSIM_M2(name, expr)                                                                \
  MSIM_I float name(float x, float y) { return expr; }                                     \
  MSIM_I half name(half a_, half b_) {                                                     \
    float x = a_, y = b_;                                                                  \
    return (half)(expr);                                                                   \
  }                                                                                        \
  MSIM_I bfloat name(bfloat a_, bfloat b_) {                                               \
    float x = a_, y = b_;                                                                  \
    return (bfloat)(expr);                                                                 \
  }                                                                                        \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                                    \
  MSIM_I V name(V a, V b) {                                                                \
    for (int i = 0; i < vtraits<V>::n; i++) a[i] = name(elem_t<V>(a[i]), elem_t<V>(b[i])); \
    return a;                                                                              \
  }
#define MSIM_M3(name, expr)                                                                                 \
  MSIM_I float name(float x, float y, float z) { return expr; }                                             \
  MSIM_I half name(half a_, half b_, half c_) {                                                             \
    float x = a_, y = b_, z = c_;                                                                           \
    return (half)(expr);                                                                                    \
  }                                                                                                         \
  MSIM_I bfloat name(bfloat a_, bfloat b_, bfloat c_) {                                                     \
    float x = a_, y = b_, z = c_;                                                                           \
    return (bfloat)(expr);                                                                                  \
  }                                                                                                         \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                                                     \
  MSIM_I V name(V a, V b, V c) {                                                                            \
    for (int i = 0; i < vtraits<V>::n; i++) a[i] = name(elem_t<V>(a[i]), elem_t<V>(b[i]), elem_t<V>(c[i])); \
    return a;                                                                                               \
  }

#define MSIM_PI 3.14159265358979323846f
#define MSIM_ALLMATH                                                       \
  MSIM_M1(exp, metal::expf(x))                                             \
  MSIM_M1(exp2, metal::exp2f(x))                                           \
  MSIM_M1(exp10, metal::exp10f(x))                                         \
  MSIM_M1(log, metal::logf(x))                                             \
  MSIM_M1(log2, metal::log2f(x))                                           \
  MSIM_M1(log10, metal::log10f(x))                                         \
  MSIM_M1(sin, metal::sinf(x))                                             \
  MSIM_M1(cos, metal::cosf(x))                                             \
  MSIM_M1(tan, metal::tanf(x))                                             \
  MSIM_M1(asin, metal::asinf(x))                                           \
  MSIM_M1(acos, metal::acosf(x))                                           \
  MSIM_M1(atan, metal::atanf(x))                                           \
  MSIM_M1(sinh, metal::sinhf(x))                                           \
  MSIM_M1(cosh, metal::coshf(x))                                           \
  MSIM_M1(tanh, metal::tanhf(x))                                           \
  MSIM_M1(asinh, metal::asinhf(x))                                         \
  MSIM_M1(acosh, metal::acoshf(x))                                         \
  MSIM_M1(atanh, metal::atanhf(x))                                         \
  MSIM_M1(sinpi, metal::sinf(x* MSIM_PI))                                  \
  MSIM_M1(cospi, metal::cosf(x* MSIM_PI))                                  \
  MSIM_M1(tanpi, metal::tanf(x* MSIM_PI))                                  \
  MSIM_M1(sqrt, __builtin_sqrtf(x))                                        \
  MSIM_M1(rsqrt, 1.0f / __builtin_sqrtf(x))                                \
  MSIM_M1(ceil, __builtin_ceilf(x))                                        \
  MSIM_M1(floor, __builtin_floorf(x))                                      \
  MSIM_M1(round, __builtin_roundf(x))                                      \
  MSIM_M1(rint, __builtin_rintf(x))                                        \
  MSIM_M1(trunc, __builtin_truncf(x))                                      \
  MSIM_M1(fabs, __builtin_fabsf(x))                                        \
  MSIM_M1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f)) \
  MSIM_M1(sign, (x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f))        \
  MSIM_M1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))       \
  MSIM_M2(pow, metal::powf(x, y))                                          \
  MSIM_M2(powr, metal::powf(x, y))                                         \
  MSIM_M2(atan2, metal::atan2f(x, y))                                      \
  MSIM_M2(fmod, metal::fmodf(x, y))                                        \
  MSIM_M2(fmin, __builtin_fminf(x, y))                                     \
  MSIM_M2(fmax, __builtin_fmaxf(x, y))                                     \
  MSIM_M2(copysign, __builtin_copysignf(x, y))                             \
  MSIM_M2(fdim, (x > y ? x - y : 0.0f))                                    \
  MSIM_M2(step, (y < x ? 0.0f : 1.0f))                                     \
  MSIM_M2(divide, x / y)                                                   \
  MSIM_M2(nextafter, metal::nextafterf(x, y))                              \
  MSIM_M3(fma, metal::fmaf(x, y, z))                                       \
  MSIM_M3(mix, x + (y - x) * z)                                            \
  MSIM_M3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))                \
  MSIM_M3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))
MSIM_ALLMATH
namespace fast {
MSIM_ALLMATH
}
namespace precise {
MSIM_ALLMATH
}

// min/max/abs/clamp: separate non-template overloads, so mixed-type calls are ambiguous as they are in Metal
#define MSIM_MM(T)                                                          \
  MSIM_I T min(T a, T b) { return b < a ? b : a; }                          \
  MSIM_I T max(T a, T b) { return a < b ? b : a; }                          \
  MSIM_I T clamp(T x, T lo, T hi) { return x < lo ? lo : hi < x ? hi : x; } \
  MSIM_I T min3(T a, T b, T c) { return min(a, min(b, c)); }                \
  MSIM_I T max3(T a, T b, T c) { return max(a, max(b, c)); }                \
  MSIM_I T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }
#define MSIM_MMF(T)                                                             \
  MSIM_I T min(T a, T b) { return (T)__builtin_fminf(a, b); }                   \
  MSIM_I T max(T a, T b) { return (T)__builtin_fmaxf(a, b); }                   \
  MSIM_I T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }               \
  MSIM_I T min3(T a, T b, T c) { return min(a, min(b, c)); }                    \
  MSIM_I T max3(T a, T b, T c) { return max(a, max(b, c)); }                    \
  MSIM_I T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); } \
  MSIM_I T abs(T a) { return (T)__builtin_fabsf(a); }
#define MSIM_VMM                                                                          \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                                   \
  MSIM_I V min(V a, V b) {                                                                \
    for (int i = 0; i < vtraits<V>::n; i++) a[i] = min(elem_t<V>(a[i]), elem_t<V>(b[i])); \
    return a;                                                                             \
  }                                                                                       \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                                   \
  MSIM_I V max(V a, V b) {                                                                \
    for (int i = 0; i < vtraits<V>::n; i++) a[i] = max(elem_t<V>(a[i]), elem_t<V>(b[i])); \
    return a;                                                                             \
  }                                                                                       \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                                   \
  MSIM_I V clamp(V a, V b, V c) {                                                         \
    return min(max(a, b), c);                                                             \
  }                                                                                       \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                                   \
  MSIM_I V clamp(V a, elem_t<V> b, elem_t<V> c) {                                         \
    for (int i = 0; i < vtraits<V>::n; i++) a[i] = clamp(elem_t<V>(a[i]), b, c);          \
    return a;                                                                             \
  }                                                                                       \
  template <class V, enable_if_t<is_vec_v<V>, int> = 0>                                   \
  MSIM_I V abs(V a) {                                                                     \
    for (int i = 0; i < vtraits<V>::n; i++) a[i] = abs(elem_t<V>(a[i]));                  \
    return a;                                                                             \
  }
#define MSIM_ABSU(T) \
  MSIM_I T abs(T a) { return a; }
#define MSIM_ABSI(T) \
  MSIM_I T abs(T a) { return a < 0 ? -a : a; }
#define MSIM_ALLMM       \
  MSIM_MM(char)          \
  MSIM_MM(signed char)   \
  MSIM_MM(uchar)         \
  MSIM_MM(short)         \
  MSIM_MM(ushort)        \
  MSIM_MM(int)           \
  MSIM_MM(uint)          \
  MSIM_MM(long)          \
  MSIM_MM(ulong)         \
  MSIM_MMF(float)        \
  MSIM_MMF(half)         \
  MSIM_MMF(bfloat)       \
  MSIM_ABSI(char)        \
  MSIM_ABSI(signed char) \
  MSIM_ABSI(short)       \
  MSIM_ABSI(int)         \
  MSIM_ABSI(long)        \
  MSIM_ABSU(uchar)       \
  MSIM_ABSU(ushort)      \
  MSIM_ABSU(uint)        \
  MSIM_ABSU(ulong)       \
  MSIM_VMM
MSIM_ALLMM
namespace fast {
MSIM_MMF(float)
MSIM_MMF(half)
MSIM_MMF(bfloat)
MSIM_VMM
}  // namespace fast
namespace precise {
MSIM_MMF(float)
MSIM_MMF(half)
MSIM_MMF(bfloat)
MSIM_VMM
}  // namespace precise

#define MSIM_CLS(name, expr)                 \
  MSIM_I bool name(float x) { return expr; } \
  MSIM_I bool name(half h) {                 \
    float x = h;                             \
    return expr;                             \
  }                                          \
  MSIM_I bool name(bfloat h) {               \
    float x = h;                             \
    return expr;                             \
  }
MSIM_CLS(isnan, __builtin_isnan(x))
MSIM_CLS(isinf, __builtin_isinf(x))
MSIM_CLS(isfinite, __builtin_isfinite(x))
MSIM_CLS(isnormal, __builtin_isnormal(x))
MSIM_CLS(signbit, (as_type<uint>(x) >> 31) != 0)
MSIM_I float ldexp(float x, int e) { return ldexpf(x, e); }
MSIM_I half ldexp(half x, int e) { return (half)ldexpf(x, e); }
MSIM_I float frexp(float x, thread int& e) { return frexpf(x, &e); }
MSIM_I float modf(float x, thread float& i) { return modff(x, &i); }
MSIM_I float sincos(float x, thread float& c) {
  c = cosf(x);
  return sinf(x);
}
MSIM_I int ilogb(float x) {
  int e;
  frexpf(x, &e);
  return e - 1;
}
namespace fast {
MSIM_I float sincos(float x, thread float& c) {
  c = cosf(x);
  return sinf(x);
}
}  // namespace fast
namespace precise {
MSIM_I float sincos(float x, thread float& c) {
  c = cosf(x);
  return sinf(x);
}
}  // namespace precise
MSIM_I float smoothstep(float a, float b, float x) {
  float t = clamp((x - a) / (b - a), 0.0f, 1.0f);
  return t * t * (3.0f - 2.0f * t);
}

template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I V mix(V a, V b, elem_t<V> t) {
  return a + (b - a) * t;
}
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I elem_t<V> dot(V a, V b) {
  elem_t<V> s = a[0] * b[0];
  for (int i = 1; i < vtraits<V>::n; i++) s += a[i] * b[i];
  return s;
}
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I elem_t<V> length_squared(V a) {
  return dot(a, a);
}
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I elem_t<V> length(V a) {
  return sqrt(dot(a, a));
}
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I elem_t<V> distance(V a, V b) {
  return length(a - b);
}
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I V normalize(V a) {
  return a * rsqrt(dot(a, a));
}
MSIM_I float3 cross(float3 a, float3 b) {
  float3 r = {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
  return r;
}
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I bool any(V a) {
  bool r = false;
  for (int i = 0; i < vtraits<V>::n; i++) r |= (bool)a[i];
  return r;
}
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I bool all(V a) {
  bool r = true;
  for (int i = 0; i < vtraits<V>::n; i++) r &= (bool)a[i];
  return r;
}
MSIM_I bool any(bool a) { return a; }
MSIM_I bool all(bool a) { return a; }
template <class T, enable_if_t<!is_vec_v<T>, int> = 0>
MSIM_I T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class V, class C, enable_if_t<is_vec_v<V> && is_vec_v<C>, int> = 0>
MSIM_I V select(V a, V b, C c) {
  for (int i = 0; i < vtraits<V>::n; i++) a[i] = c[i] ? b[i] : a[i];
  return a;
}

#define MSIM_INTF(T)                                                                                    \
  MSIM_I T popcount(T x) { return (T)__builtin_popcountll((ulong)x & (~0UL >> (64 - 8 * sizeof(T)))); } \
  MSIM_I T clz(T x) {                                                                                   \
    ulong u = (ulong)x & (~0UL >> (64 - 8 * sizeof(T)));                                                \
    return (T)(u ? __builtin_clzll(u) - (64 - 8 * (int)sizeof(T)) : 8 * (int)sizeof(T));                \
  }                                                                                                     \
  MSIM_I T ctz(T x) {                                                                                   \
    ulong u = (ulong)x & (~0UL >> (64 - 8 * sizeof(T)));                                                \
    return (T)(u ? __builtin_ctzll(u) : 8 * (int)sizeof(T));                                            \
  }                                                                                                     \
  MSIM_I T reverse_bits(T x) { return (T)(__builtin_bitreverse64((ulong)x) >> (64 - 8 * sizeof(T))); }  \
  MSIM_I T rotate(T x, T y) {                                                                           \
    int b = 8 * sizeof(T), s = (int)(y & (T)(b - 1));                                                   \
    ulong u = (ulong)x & (~0UL >> (64 - b));                                                            \
    return s ? (T)((u << s) | (u >> (b - s))) : x;                                                      \
  }                                                                                                     \
  MSIM_I T extract_bits(T x, uint o, uint n) {                                                          \
    if (!n) return 0;                                                                                   \
    int b = 8 * sizeof(T);                                                                              \
    ulong u = (ulong)x & (~0UL >> (64 - b));                                                            \
    u = (u >> o) & (~0UL >> (64 - n));                                                                  \
    if ((T) - 1 < (T)0) { return (T)((long)(u << (64 - n)) >> (64 - n)); }                              \
    return (T)u;                                                                                        \
  }                                                                                                     \
  MSIM_I T insert_bits(T base, T ins, uint o, uint n) {                                                 \
    if (!n) return base;                                                                                \
    ulong m = (~0UL >> (64 - n)) << o;                                                                  \
    return (T)(((ulong)base & ~m) | (((ulong)ins << o) & m));                                           \
  }                                                                                                     \
  MSIM_I T absdiff(T a, T b) { return a > b ? a - b : b - a; }                                          \
  MSIM_I T mulhi(T a, T b) { return (T)(((__int128)a * (__int128)b) >> (8 * sizeof(T))); }
MSIM_INTF(char)
MSIM_INTF(uchar)
MSIM_INTF(short)
MSIM_INTF(ushort)
MSIM_INTF(int)
MSIM_INTF(uint)
MSIM_INTF(long)
MSIM_INTF(ulong)
template <class V, enable_if_t<is_vec_v<V>, int> = 0>
MSIM_I V popcount(V a) {
  for (int i = 0; i < vtraits<V>::n; i++) a[i] = popcount(elem_t<V>(a[i]));
  return a;
}
MSIM_I int mad24(int a, int b, int c) { return a * b + c; }
MSIM_I uint mad24(uint a, uint b, uint c) { return a * b + c; }
MSIM_I int mul24(int a, int b) { return a * b; }
MSIM_I uint mul24(uint a, uint b) { return a * b; }

MSIM_I float4 unpack_unorm4x8_to_float(uint x) {
  float4 r = {(float)(x & 255) / 255.0f, (float)((x >> 8) & 255) / 255.0f, (float)((x >> 16) & 255) / 255.0f,
              (float)(x >> 24) / 255.0f};
  return r;
}

}  // namespace metal
