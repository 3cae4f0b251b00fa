// Relaxed atomics, which the checker sees as such.
#pragma once
#include "msim/simd.h"

namespace metal {

template <class T>
struct atomic {
  T msim_v;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
typedef atomic<long> atomic_long;
#define MSIM_PC __builtin_return_address(0)
#define MSIM_ATOM(AS)                                                                               \
  template <class T, class U = T>                                                                   \
  MSIM_NOSAN void atomic_store_explicit(volatile AS atomic<T>* o, U v, memory_order) {              \
    msim_atomic_access((const volatile void*)o, sizeof(T), 1, MSIM_PC);                             \
    o->msim_v = (T)v;                                                                               \
  }                                                                                                 \
  template <class T>                                                                                \
  MSIM_NOSAN T atomic_load_explicit(const volatile AS atomic<T>* o, memory_order) {                 \
    msim_atomic_access((const volatile void*)o, sizeof(T), 0, MSIM_PC);                             \
    return o->msim_v;                                                                               \
  }                                                                                                 \
  template <class T, class U = T>                                                                   \
  MSIM_NOSAN T atomic_exchange_explicit(volatile AS atomic<T>* o, U v, memory_order) {              \
    msim_atomic_access((const volatile void*)o, sizeof(T), 2, MSIM_PC);                             \
    T r = o->msim_v;                                                                                \
    o->msim_v = (T)v;                                                                               \
    return r;                                                                                       \
  }                                                                                                 \
  template <class T, class U = T>                                                                   \
  MSIM_NOSAN bool atomic_compare_exchange_weak_explicit(volatile AS atomic<T>* o, thread T* e, U v, \
                                                        memory_order, memory_order) {               \
    msim_atomic_access((const volatile void*)o, sizeof(T), 2, MSIM_PC);                             \
    T r = o->msim_v;                                                                                \
    if (as_bits(r) == as_bits(*e)) {                                                                \
      o->msim_v = (T)v;                                                                             \
      return true;                                                                                  \
    }                                                                                               \
    *e = r;                                                                                         \
    return false;                                                                                   \
  }                                                                                                 \
  MSIM_AFETCH(AS, add, r + (T)v)                                                                    \
  MSIM_AFETCH(AS, sub, r - (T)v)                                                                    \
  MSIM_AFETCH(AS, min, ((T)v < r ? (T)v : r))                                                       \
  MSIM_AFETCH(AS, max, (r < (T)v ? (T)v : r))                                                       \
  MSIM_AFETCH(AS, and, r&(T)v)                                                                      \
  MSIM_AFETCH(AS, or, r | (T)v)                                                                     \
  MSIM_AFETCH(AS, xor, r ^ (T)v)
#define MSIM_AFETCH(AS, nm, expr)                                                          \
  template <class T, class U = T>                                                          \
  MSIM_NOSAN T atomic_fetch_##nm##_explicit(volatile AS atomic<T>* o, U v, memory_order) { \
    msim_atomic_access((const volatile void*)o, sizeof(T), 2, MSIM_PC);                    \
    T r = o->msim_v;                                                                       \
    o->msim_v = (T)(expr);                                                                 \
    return r;                                                                              \
  }
template <class T>
MSIM_I auto as_bits(T t) {
  if constexpr (sizeof(T) == 4)
    return as_type<uint>(t);
  else if constexpr (sizeof(T) == 8)
    return as_type<ulong>(t);
  else
    return t;
}
#if MSIM_AS
MSIM_ATOM(device)
MSIM_ATOM(threadgroup)
#else
MSIM_ATOM()
#endif

}  // namespace metal
