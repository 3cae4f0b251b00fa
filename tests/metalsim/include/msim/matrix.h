// simdgroup_matrix: 8x8, with the lane layout of Apple GPUs.
#pragma once
#include "msim/simd.h"

namespace metal {

extern "C" unsigned msim_lane();
template <class T, int R = 8, int C = 8>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "only 8x8");
  vec<T, 2> e;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T v) {
    for (int k = 0; k < 2; k++) e[k] = (msim_row() == msim_col() + k) ? v : T(0);
  }  // diagonal matrix, as in MSL
  static unsigned msim_row() {
    unsigned l = msim_lane(), q = l / 4;
    return (q & 4) + ((l / 2) % 4);
  }
  static unsigned msim_col() {
    unsigned l = msim_lane(), q = l / 4;
    return (q & 2) * 2 + (l % 2) * 2;
  }
  thread vec<T, 2>& thread_elements() { return e; }
  thread const vec<T, 2>& thread_elements() const { return e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C>
MSIM_I simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.e[0] = v;
  m.e[1] = v;
  return m;
}
#define MSIM_SGLS(AS)                                                                           \
  template <class T>                                                                            \
  MSIM_I void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const AS T* p, ulong ld = 8,  \
                             ulong2 org = ulong2{0, 0}, bool tr = false) {                      \
    ulong r = simdgroup_matrix<T, 8, 8>::msim_row(), c = simdgroup_matrix<T, 8, 8>::msim_col(); \
    for (int k = 0; k < 2; k++)                                                                 \
      m.e[k] = tr ? p[(org.y + c + k) * ld + org.x + r] : p[(org.y + r) * ld + org.x + c + k];  \
  }                                                                                             \
  template <class T>                                                                            \
  MSIM_I void simdgroup_store(thread const simdgroup_matrix<T, 8, 8>& m, AS T* p, ulong ld = 8, \
                              ulong2 org = ulong2{0, 0}, bool tr = false) {                     \
    ulong r = simdgroup_matrix<T, 8, 8>::msim_row(), c = simdgroup_matrix<T, 8, 8>::msim_col(); \
    for (int k = 0; k < 2; k++) {                                                               \
      if (tr)                                                                                   \
        p[(org.y + c + k) * ld + org.x + r] = m.e[k];                                           \
      else                                                                                      \
        p[(org.y + r) * ld + org.x + c + k] = m.e[k];                                           \
    }                                                                                           \
  }
#if MSIM_AS
MSIM_SGLS(device)
MSIM_SGLS(threadgroup)
#else
MSIM_SGLS()
#endif
template <class D, class A, class B>
MSIM_NOSAN void msim_mma(thread D* d, const msim_x& x) {
  // operand pair of lane l lives in its slot: a.e then b.e
  unsigned r = simdgroup_matrix<float>::msim_row(), c = simdgroup_matrix<float>::msim_col();
  struct P {
    vec<A, 2> a;
    vec<B, 2> b;
  };
  float s0 = d[0], s1 = d[1];
  for (unsigned k = 0; k < 8; k++) {
    unsigned la = (r & 4) * 4 + (k & 4) * 2 + (r & 3) * 2 + ((k >> 1) & 1),
             lb = (k & 4) * 4 + (c & 4) * 2 + (k & 3) * 2 + ((c >> 1) & 1);
    P pa = x.get<P>(la), pb = x.get<P>(lb);
    float av = pa.a[k & 1];
    s0 += av * (float)pb.b[0];
    s1 += av * (float)pb.b[1];
  }
  d[0] = (D)s0;
  d[1] = (D)s1;
}
template <class D, class A, class B, class C>
MSIM_I void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                          thread const simdgroup_matrix<A, 8, 8>& a,
                                          thread const simdgroup_matrix<B, 8, 8>& b,
                                          thread const simdgroup_matrix<C, 8, 8>& c, MSIM_LOC) {
  struct P {
    vec<A, 2> a;
    vec<B, 2> b;
  } p{a.e, b.e};
  D t[2] = {(D)c.e[0], (D)c.e[1]};
  auto x = msim_ex(p, "simdgroup_multiply_accumulate", file_, MSIM_SITE);
  if (x.mask != 0xffffffffu) msim_report(9, file_, MSIM_SITE, x.mask, 0);
  msim_mma<D, A, B>(t, x);
  d.e[0] = t[0];
  d.e[1] = t[1];
}
template <class D, class A, class B>
MSIM_I void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, thread const simdgroup_matrix<A, 8, 8>& a,
                               thread const simdgroup_matrix<B, 8, 8>& b, MSIM_LOC) {
  simdgroup_matrix<D, 8, 8> z;
  z.e[0] = z.e[1] = D(0);
  simdgroup_multiply_accumulate(d, a, b, z, file_, line_, col_);
}

}  // namespace metal
