// Vector types, their constructors, as_type and numeric_limits.
#pragma once
#include "msim/traits.h"

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}  // namespace metal

#define MSIM_VT(T)                                                                 \
  typedef T T##2 __attribute__((ext_vector_type(2)));                              \
  typedef T T##3 __attribute__((ext_vector_type(3)));                              \
  typedef T T##4 __attribute__((ext_vector_type(4)));                              \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
MSIM_VT(bool)
MSIM_VT(char)
MSIM_VT(uchar)
MSIM_VT(short)
MSIM_VT(ushort)
MSIM_VT(int)
MSIM_VT(uint)
MSIM_VT(long)
MSIM_VT(ulong)
MSIM_VT(half)
MSIM_VT(float)
MSIM_VT(bfloat)

namespace metal {
using ::bfloat;
using ::bfloat2;
using ::bfloat3;
using ::bfloat4;
using ::bool2;
using ::bool3;
using ::bool4;
using ::char2;
using ::char3;
using ::char4;
using ::float2;
using ::float3;
using ::float4;
using ::half;
using ::half2;
using ::half3;
using ::half4;
using ::int16_t;
using ::int2;
using ::int3;
using ::int32_t;
using ::int4;
using ::int64_t;
using ::int8_t;
using ::long2;
using ::long3;
using ::long4;
using ::short2;
using ::short3;
using ::short4;
using ::uchar;
using ::uchar2;
using ::uchar3;
using ::uchar4;
using ::uint;
using ::uint16_t;
using ::uint2;
using ::uint3;
using ::uint32_t;
using ::uint4;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ulong2;
using ::ulong3;
using ::ulong4;
using ::ushort;
using ::ushort2;
using ::ushort3;
using ::ushort4;

template <class V>
struct vtraits {
  typedef V elem;
  static constexpr int n = 1;
  static constexpr bool is_vec = false;
};
template <class T>
struct vtraits<T __attribute__((ext_vector_type(2)))> {
  typedef T elem;
  static constexpr int n = 2;
  static constexpr bool is_vec = true;
};
template <class T>
struct vtraits<T __attribute__((ext_vector_type(3)))> {
  typedef T elem;
  static constexpr int n = 3;
  static constexpr bool is_vec = true;
};
template <class T>
struct vtraits<T __attribute__((ext_vector_type(4)))> {
  typedef T elem;
  static constexpr int n = 4;
  static constexpr bool is_vec = true;
};
template <class T>
struct vtraits<T __attribute__((ext_vector_type(8)))> {
  typedef T elem;
  static constexpr int n = 8;
  static constexpr bool is_vec = true;
};
template <class V>
using elem_t = typename vtraits<V>::elem;
template <class V>
constexpr bool is_vec_v = vtraits<V>::is_vec;

template <class V, class A>
MSIM_I void msl_fill_(V& v, int& i, A a) {
  using E = elem_t<V>;
  if constexpr (is_vec_v<A>) {
    for (int k = 0; k < vtraits<A>::n; k++) v[i++] = (E)a[k];
  } else {
    v[i++] = (E)a;
  }
}
template <class A>
constexpr int msl_count_ = vtraits<A>::n;
// every functional cast of a vector type goes through here: float4(x), float4(v.xy, 1, 2), vec<T,4>(a,b,c,d)
template <class V, class... A>
MSIM_I V msl_make(A... a) {
  if constexpr (!is_vec_v<V>) {
    return V(a...);
  } else {
    using E = elem_t<V>;
    V v;
    if constexpr (sizeof...(A) == 0) {
      for (int k = 0; k < vtraits<V>::n; k++) v[k] = (E)0;
    } else if constexpr (sizeof...(A) == 1 && (!is_vec_v<A> && ...)) {
      E s = (E(a), ...);
      for (int k = 0; k < vtraits<V>::n; k++) v[k] = s;
    } else {
      static_assert((msl_count_<A> + ... + 0) == vtraits<V>::n,
                    "vector constructor: wrong number of elements");
      int i = 0;
      (msl_fill_(v, i, a), ...);
    }
    return v;
  }
}
template <class T, class U>
MSIM_I T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  return __builtin_bit_cast(T, u);
}

template <class T>
struct numeric_limits;
#define MSIM_NLI(T, lo, hi)                                              \
  template <>                                                            \
  struct numeric_limits<T> {                                             \
    static constexpr bool is_integer = true, is_signed = (T) - 1 < (T)0; \
    static constexpr int digits = sizeof(T) * 8 - is_signed;             \
    static constexpr T max() { return hi; }                              \
    static constexpr T min() { return lo; }                              \
    static constexpr T lowest() { return lo; }                           \
    static constexpr T infinity() { return 0; }                          \
    static constexpr T epsilon() { return 0; }                           \
  };
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
  static constexpr bool lowest() { return false; }
};
MSIM_NLI(char, -128, 127)
MSIM_NLI(signed char, -128, 127)
MSIM_NLI(uchar, 0, 255)
MSIM_NLI(short, -32768, 32767)
MSIM_NLI(ushort, 0, 65535)
MSIM_NLI(int, INT_MIN, INT_MAX)
MSIM_NLI(uint, 0, UINT_MAX)
MSIM_NLI(long, LONG_MIN, LONG_MAX)
MSIM_NLI(ulong, 0, ULONG_MAX)
#define MSIM_NLF(T, mx, mn, ep, dg)                                                  \
  template <>                                                                        \
  struct numeric_limits<T> {                                                         \
    static constexpr bool is_integer = false, is_signed = true, has_infinity = true; \
    static constexpr int digits = dg;                                                \
    static constexpr T max() { return (T)mx; }                                       \
    static constexpr T min() { return (T)mn; }                                       \
    static constexpr T lowest() { return (T) - mx; }                                 \
    static constexpr T infinity() { return (T)__builtin_inff(); }                    \
    static constexpr T epsilon() { return (T)ep; }                                   \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }                 \
    static constexpr T denorm_min() { return (T)mn; }                                \
  };
MSIM_NLF(float, FLT_MAX, FLT_MIN, FLT_EPSILON, 24)
MSIM_NLF(half, 65504.0f, 6.103515625e-05f, 0.0009765625f, 11)
MSIM_NLF(bfloat, 3.38953138925e+38f, FLT_MIN, 0.0078125f, 8)

}  // namespace metal
