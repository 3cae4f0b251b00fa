// Barriers and what lanes of a SIMD-group exchange; runtime/ gives them their meaning.
#pragma once
#include "msim/math.h"

namespace metal {

enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
MSIM_I constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }
MSIM_I constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags((int)a & (int)b); }
enum memory_order {
  memory_order_relaxed = 0,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};
struct simd_vote {
  typedef ulong vote_t;
  vote_t v;
  explicit constexpr simd_vote(vote_t x = 0) : v(x) {}
  explicit constexpr operator vote_t() const { return v; }
  bool all() const { return v == 0xffffffffUL; }
  bool any() const { return v != 0; }
};

extern "C" {
struct msim_xchg {
  unsigned char* slots;
  unsigned char* result;
  unsigned mask;
  unsigned lane;
  int leader;
};
#define MSIM_CONV __attribute__((convergent, noduplicate))
MSIM_CONV void msim_simd_exchange(const void* v, unsigned n, const char* what, const char* file,
                                  unsigned site, msim_xchg* out);
MSIM_CONV void msim_barrier(int flags, int simd_scope, const char* file, unsigned site);
void msim_report(int kind, const char* file, unsigned site, long a, long b);
void msim_atomic_access(const volatile void* p, unsigned n, int write, void* pc);
void msim_fence(int flags);
}
#define MSIM_LOC \
  const char *file_ = __builtin_FILE(), unsigned line_ = __builtin_LINE(), unsigned col_ = __builtin_COLUMN()
#define MSIM_SITE ((line_ << 10) | (col_ & 1023))

MSIM_I void threadgroup_barrier(mem_flags f, MSIM_LOC) { msim_barrier((int)f, 0, file_, MSIM_SITE); }
MSIM_I void simdgroup_barrier(mem_flags f, MSIM_LOC) { msim_barrier((int)f, 1, file_, MSIM_SITE); }
MSIM_I void atomic_thread_fence(mem_flags f, memory_order = memory_order_relaxed,
                                thread_scope = thread_scope_device) {
  msim_fence((int)f);
}

struct msim_x : msim_xchg {
  template <class T>
  MSIM_NOSAN T get(unsigned l) const {
    T t;
    __builtin_memcpy(&t, slots + 64 * l, sizeof(T));
    return t;
  }
  bool active(unsigned l) const { return l < 32 && (mask >> l & 1); }
};
template <class T>
MSIM_I msim_x msim_ex(T v, const char* what, const char* f, unsigned s) {
  static_assert(sizeof(T) <= 64, "simd operand too big");
  msim_x x;
  msim_simd_exchange(&v, sizeof(T), what, f, s, &x);
  return x;
}
// reduction in butterfly order over the active lanes, computed once per SIMD-group
template <class T, class F>
MSIM_NOSAN T msim_reduce(const msim_x& x, F f) {
  T r;
  if (x.leader) {
    T v[32];
    unsigned m = x.mask;
    for (int i = 0; i < 32; i++)
      if (m >> i & 1) v[i] = x.get<T>(i);
    for (int off = 16; off; off >>= 1) {
      unsigned nm = 0;
      for (int i = 0; i < off; i++) {
        bool a = m >> i & 1, b = m >> (i + off) & 1;
        if (a && b)
          v[i] = f(v[i], v[i + off]);
        else if (b)
          v[i] = v[i + off];
        if (a || b) nm |= 1u << i;
      }
      m = nm;
    }
    r = v[0];
    __builtin_memcpy(x.result, &r, sizeof(T));
  } else
    __builtin_memcpy(&r, x.result, sizeof(T));
  return r;
}
#define MSIM_RED(name, expr)                                      \
  template <class T>                                              \
  MSIM_I T name(T v, MSIM_LOC) {                                  \
    auto x = msim_ex(v, #name, file_, MSIM_SITE);                 \
    return msim_reduce<T>(x, [](T a, T b) -> T { return expr; }); \
  }
template <class T>
MSIM_I T msim_min_(T a, T b) {
  return min(a, b);
}
template <class T>
MSIM_I T msim_max_(T a, T b) {
  return max(a, b);
}
MSIM_RED(simd_sum, a + b)
MSIM_RED(simd_product, a* b)
MSIM_RED(simd_min, msim_min_(a, b))
MSIM_RED(simd_max, msim_max_(a, b))
MSIM_RED(simd_and, a& b)
MSIM_RED(simd_or, a | b)
MSIM_RED(simd_xor, a ^ b)

template <class T>
MSIM_I T msim_pick(const msim_x& x, int src, T own, const char* f, unsigned s) {
  if (src < 0 || src > 31 || !x.active(src)) {
    msim_report(10, f, s, src, x.mask);
    T r;
    __builtin_memset(&r, 0xff, sizeof(T));
    return r;
  }
  return x.get<T>(src);
}
template <class T>
MSIM_I T simd_shuffle(T v, ushort l, MSIM_LOC) {
  auto x = msim_ex(v, "simd_shuffle", file_, MSIM_SITE);
  return msim_pick(x, l, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T simd_broadcast(T v, ushort l, MSIM_LOC) {
  auto x = msim_ex(v, "simd_broadcast", file_, MSIM_SITE);
  return msim_pick(x, l, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T simd_broadcast_first(T v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_broadcast_first", file_, MSIM_SITE);
  return x.template get<T>(__builtin_ctz(x.mask));
}
template <class T>
MSIM_I T simd_shuffle_xor(T v, ushort m, MSIM_LOC) {
  auto x = msim_ex(v, "simd_shuffle_xor", file_, MSIM_SITE);
  return msim_pick(x, (int)(x.lane ^ m), v, file_, MSIM_SITE);
}
// shuffle_up/down do not wrap: the lower/upper `d` lanes keep their own value
template <class T>
MSIM_I T simd_shuffle_down(T v, ushort d, MSIM_LOC) {
  auto x = msim_ex(v, "simd_shuffle_down", file_, MSIM_SITE);
  return x.lane + d > 31 ? v : msim_pick(x, x.lane + d, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T simd_shuffle_up(T v, ushort d, MSIM_LOC) {
  auto x = msim_ex(v, "simd_shuffle_up", file_, MSIM_SITE);
  return x.lane < d ? v : msim_pick(x, x.lane - d, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T simd_shuffle_rotate_down(T v, ushort d, MSIM_LOC) {
  auto x = msim_ex(v, "simd_shuffle_rotate_down", file_, MSIM_SITE);
  return msim_pick(x, (x.lane + d) & 31, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T simd_shuffle_rotate_up(T v, ushort d, MSIM_LOC) {
  auto x = msim_ex(v, "simd_shuffle_rotate_up", file_, MSIM_SITE);
  return msim_pick(x, (x.lane - d) & 31, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T simd_shuffle_and_fill_down(T v, T fill, ushort d, MSIM_LOC) {
  struct P {
    T a, b;
  } p{v, fill};
  auto x = msim_ex(p, "simd_shuffle_and_fill_down", file_, MSIM_SITE);
  return x.lane + d > 31 ? msim_pick(x, (x.lane + d) & 31, p, file_, MSIM_SITE).b
                         : msim_pick(x, x.lane + d, p, file_, MSIM_SITE).a;
}
template <class T>
MSIM_I T simd_shuffle_and_fill_up(T v, T fill, ushort d, MSIM_LOC) {
  struct P {
    T a, b;
  } p{v, fill};
  auto x = msim_ex(p, "simd_shuffle_and_fill_up", file_, MSIM_SITE);
  return x.lane < d ? msim_pick(x, (x.lane - d) & 31, p, file_, MSIM_SITE).b
                    : msim_pick(x, x.lane - d, p, file_, MSIM_SITE).a;
}
template <class T, class F>
MSIM_NOSAN T msim_scan(const msim_x& x, T init, bool incl, F f) {
  T r = init;
  for (unsigned i = 0; i < x.lane + (incl ? 1 : 0); i++)
    if (x.active(i)) r = f(r, x.get<T>(i));
  return r;
}
template <class T>
MSIM_I T simd_prefix_inclusive_sum(T v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_prefix_inclusive_sum", file_, MSIM_SITE);
  return msim_scan<T>(x, T(0), true, [](T a, T b) -> T { return a + b; });
}
template <class T>
MSIM_I T simd_prefix_exclusive_sum(T v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_prefix_exclusive_sum", file_, MSIM_SITE);
  return msim_scan<T>(x, T(0), false, [](T a, T b) -> T { return a + b; });
}
template <class T>
MSIM_I T simd_prefix_inclusive_product(T v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_prefix_inclusive_product", file_, MSIM_SITE);
  return msim_scan<T>(x, T(1), true, [](T a, T b) -> T { return a * b; });
}
template <class T>
MSIM_I T simd_prefix_exclusive_product(T v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_prefix_exclusive_product", file_, MSIM_SITE);
  return msim_scan<T>(x, T(1), false, [](T a, T b) -> T { return a * b; });
}
MSIM_NOSAN inline ulong msim_ballot(const msim_x& x) {
  ulong r = 0;
  for (unsigned i = 0; i < 32; i++)
    if (x.active(i) && x.get<bool>(i)) r |= 1UL << i;
  return r;
}
MSIM_I simd_vote simd_ballot(bool v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_ballot", file_, MSIM_SITE);
  return simd_vote(msim_ballot(x));
}
MSIM_I bool simd_any(bool v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_any", file_, MSIM_SITE);
  return msim_ballot(x) != 0;
}
MSIM_I bool simd_all(bool v, MSIM_LOC) {
  auto x = msim_ex(v, "simd_all", file_, MSIM_SITE);
  return msim_ballot(x) == x.mask;
}
MSIM_I bool simd_is_first(MSIM_LOC) {
  auto x = msim_ex(true, "simd_is_first", file_, MSIM_SITE);
  return x.lane == (unsigned)__builtin_ctz(x.mask);
}
MSIM_I simd_vote simd_active_threads_mask(MSIM_LOC) {
  auto x = msim_ex(true, "simd_active_threads_mask", file_, MSIM_SITE);
  return simd_vote(x.mask);
}
MSIM_I bool simd_is_helper_thread() { return false; }
// quad-groups: lanes 4k..4k+3
#define MSIM_QRED(name, expr)                     \
  template <class T>                              \
  MSIM_I T name(T v, MSIM_LOC) {                  \
    auto x = msim_ex(v, #name, file_, MSIM_SITE); \
    unsigned q = x.lane & ~3u;                    \
    bool h = false;                               \
    T r = v;                                      \
    for (unsigned i = q; i < q + 4; i++)          \
      if (x.active(i)) {                          \
        T b = x.template get<T>(i);               \
        if (!h) {                                 \
          r = b;                                  \
          h = true;                               \
        } else {                                  \
          T a = r;                                \
          r = expr;                               \
        }                                         \
      }                                           \
    return r;                                     \
  }
MSIM_QRED(quad_sum, a + b)
MSIM_QRED(quad_product, a* b)
MSIM_QRED(quad_min, msim_min_(a, b))
MSIM_QRED(quad_max, msim_max_(a, b))
MSIM_QRED(quad_and, a& b)
MSIM_QRED(quad_or, a | b)
MSIM_QRED(quad_xor, a ^ b)
template <class T>
MSIM_I T quad_broadcast(T v, ushort l, MSIM_LOC) {
  auto x = msim_ex(v, "quad_broadcast", file_, MSIM_SITE);
  return msim_pick(x, (x.lane & ~3u) + l, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T quad_shuffle(T v, ushort l, MSIM_LOC) {
  auto x = msim_ex(v, "quad_shuffle", file_, MSIM_SITE);
  return msim_pick(x, (x.lane & ~3u) + l, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T quad_shuffle_xor(T v, ushort m, MSIM_LOC) {
  auto x = msim_ex(v, "quad_shuffle_xor", file_, MSIM_SITE);
  return msim_pick(x, x.lane ^ (m & 3), v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T quad_shuffle_down(T v, ushort d, MSIM_LOC) {
  auto x = msim_ex(v, "quad_shuffle_down", file_, MSIM_SITE);
  return (x.lane & 3) + d > 3 ? v : msim_pick(x, x.lane + d, v, file_, MSIM_SITE);
}
template <class T>
MSIM_I T quad_shuffle_up(T v, ushort d, MSIM_LOC) {
  auto x = msim_ex(v, "quad_shuffle_up", file_, MSIM_SITE);
  return (x.lane & 3) < d ? v : msim_pick(x, x.lane - d, v, file_, MSIM_SITE);
}

}  // namespace metal
