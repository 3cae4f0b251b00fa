// matmul2d of Metal 4 on cooperative tensors, for one SIMD-group and operands of 16 bits. What Apple leaves open
// the seed of `order` chooses: where elements lie, how many a thread has room for, and in which order each sum is
// taken. Of what nobody documents, one thing is taken for granted: an order depends on no value and no other run.
#pragma once
#include "msim/msl.h"

namespace metal {

template <class T, size_t N>
struct array {
  T e[N];
  thread T& operator[](size_t i) { return e[i]; }
  thread const T& operator[](size_t i) const { return e[i]; }
};
template <size_t N>
struct execution_simdgroups {};
typedef execution_simdgroups<1> execution_simdgroup;

extern "C" unsigned msim_order();
extern "C" void msim_tensor_element(unsigned i, unsigned capacity);
// Bits of an element that nobody has written, which are no number.
template <class T>
using msim_bits = conditional_t<sizeof(T) == 2, ushort, uint>;
template <class T>
constexpr constant msim_bits<T> msim_unwritten = msim_bits<T>(sizeof(T) == 2 ? 0xfff5u : 0xfff5a5f5u);

struct msim_dice {
  uint state;
  explicit msim_dice(uint seed) : state(seed * 2654435761u + 1) { below(2); }
  uint below(uint n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % n;
  }
};

// Which element lies where in ROLE's tensor of the operation OP, drawn for each of them and a seed.
template <class OP, int ROLE, int ELEMENTS>
struct msim_layout {
  static constexpr int MOST = ELEMENTS / 32 + 4;
  uint drawn, capacity;       // drawn: for the seed below that; in memory that is 0 at first
  ushort element[32 * MOST];  // by 32 * index + lane; ELEMENTS and above: none

  MSIM_NOSAN static const msim_layout* get() {
    static msim_layout one;
    if (one.drawn != msim_order() + 1) one.draw(msim_order());
    return &one;
  }
  MSIM_NOSAN void draw(uint order) {
    uint name = order;
    for (const char* c = __PRETTY_FUNCTION__; *c; c++) name = 31 * name + *c;
    msim_dice dice(name);
    drawn = order + 1;
    capacity = ELEMENTS / 32 + (order > 1 ? dice.below(5) : order);
    const uint slots = 32 * capacity;
    for (uint i = 0; i < slots; i++) element[i] = order == 1 ? slots - 1 - i : i;
    if (order > 1)
      for (uint i = slots; i > 1; i--) {
        const uint j = dice.below(i);
        const ushort kept = element[i - 1];
        element[i - 1] = element[j];
        element[j] = kept;
      }
  }
};

// ROLE: 0 left [ROWS m, COLUMNS k], 1 right [k, n], 2 destination [m, n].
template <class T, class OP, int ROLE, int COLUMNS, int ROWS>
struct cooperative_tensor {
  typedef T element_type;
  typedef msim_layout<OP, ROLE, COLUMNS * ROWS> layout;
  typedef OP msim_op;
  static constexpr int msim_role = ROLE, msim_columns = COLUMNS, msim_elements = COLUMNS * ROWS;
  T e[layout::MOST];
  uint lane;

  MSIM_NOSAN cooperative_tensor() : lane(msim_lane()) {
    for (thread T& each : e) __builtin_memcpy(&each, &msim_unwritten<T>, sizeof(T));
  }
  MSIM_NOSAN uint16_t get_capacity() const { return layout::get()->capacity; }
  MSIM_NOSAN bool is_valid_element(uint16_t i) const {
    return i < get_capacity() && layout::get()->element[32 * i + lane] < msim_elements;
  }
  // Of an element that is not valid they lie outside.
  MSIM_NOSAN array<int, 2> get_multidimensional_index(uint16_t i) const {
    if (!is_valid_element(i)) return {{1 << 24, 1 << 24}};
    const int at = layout::get()->element[32 * i + lane];
    return {{at % COLUMNS, at / COLUMNS}};
  }
  MSIM_I thread T& operator[](uint16_t i) {
    if (!is_valid_element(i)) {
      msim_tensor_element(i, get_capacity());
      return e[0];
    }
    return e[i];
  }
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m_, int n_, int k_, bool left = false, bool right = false,
                                bool relaxed = false, mode mode_ = mode::multiply)
      : m(m_),
        n(n_),
        k(k_),
        transpose_left(left),
        transpose_right(right),
        relaxed_precision(relaxed),
        matmul_mode(mode_) {}
};

template <class T>
constexpr constant bool msim_16_bits = metal::is_same_v<T, half> || metal::is_same_v<T, bfloat>;

template <matmul2d_descriptor D, class SCOPE>
struct matmul2d {
  static_assert(metal::is_same_v<SCOPE, metal::execution_simdgroup>, "only one SIMD-group is simulated");
  static_assert(!D.transpose_left && !D.transpose_right, "transposed operands are not simulated");
  static_assert(D.m % 16 == 0 || D.n % 16 == 0, "At least one of M or N must be a multiple of 16");
  static_assert(D.m == 32 || D.n == 32 || D.k == 32,
                "At least one of M, N, or K must be 32 if both inputs are cooperative tensors");
  static_assert(D.m * D.k % 32 == 0 && D.k * D.n % 32 == 0 && D.m * D.n % 32 == 0, "not simulated");

  template <class L, class R, class T>
  struct msim_types {
    static_assert(msim_16_bits<L> && msim_16_bits<R> && metal::is_same_v<T, float>,
                  "only half and bfloat times half and bfloat to float are simulated");
    typedef matmul2d op;
    template <class V, int ROLE, int COLUMNS, int ROWS>
    using tensor = metal::cooperative_tensor<V, msim_types, ROLE, COLUMNS, ROWS>;
  };
  template <class L, class R, class T>
  auto get_left_input_cooperative_tensor() const {
    return typename msim_types<L, R, T>::template tensor<L, 0, D.k, D.m>();
  }
  template <class L, class R, class T>
  auto get_right_input_cooperative_tensor() const {
    return typename msim_types<L, R, T>::template tensor<R, 1, D.n, D.k>();
  }
  template <class L, class R, class T>
  auto get_destination_cooperative_tensor() const {
    static_assert(metal::is_same_v<typename L::msim_op, typename R::msim_op>, "operands of two operations");
    return typename msim_types<typename L::element_type, typename R::element_type,
                               T>::template tensor<T, 2, D.n, D.m>();
  }
  template <class L, class R, class T>
  MSIM_I void run(thread L& left, thread R& right, thread T& sums, MSIM_LOC) const {
    static_assert(L::msim_role == 0 && R::msim_role == 1 && T::msim_role == 2, "operands in the wrong place");
    static_assert(metal::is_same_v<typename L::msim_op::op, matmul2d>, "operands of another operation");
    static_assert(metal::is_same_v<typename L::msim_op, typename R::msim_op> &&
                      metal::is_same_v<typename L::msim_op, typename T::msim_op>,
                  "operands of two operations");
    struct Given {
      thread L* left;
      thread R* right;
      thread T* sums;
    };
    auto x = metal::msim_ex(Given{&left, &right, &sums}, "matmul2d::run", file_, MSIM_SITE);
    if (x.mask != ~0u) {
      if (x.leader) metal::msim_report(22, file_, MSIM_SITE, x.mask, 0);
    } else if (x.leader) {
      multiply<Given, L, R, T>(x, file_, MSIM_SITE);
    }
  }

 private:
  // The values by element, of all lanes; a finding where nobody has written one.
  template <class V, class G>
  MSIM_NOSAN static void gather(const metal::msim_x& x, thread V* G::* which, thread float* values,
                                const char* file, unsigned site) {
    const auto* lies = V::layout::get();
    for (uint i = 0; i < 32 * lies->capacity; i++) {
      const uint at = lies->element[i];
      if (at >= (uint)V::msim_elements) continue;
      auto value = (x.get<G>(i % 32).*which)->e[i / 32];
      if (!__builtin_memcmp(&value, &metal::msim_unwritten<decltype(value)>, sizeof(value)))
        metal::msim_report(24, file, site, at % V::msim_columns, at / V::msim_columns);
      values[at] = value;
    }
  }
  // One element: a tree over the products and the sum so far, each addition rounded.
  MSIM_NOSAN static float add(thread float* terms, int count, uint element) {
    const uint order = metal::msim_order();
    metal::msim_dice dice(order * 7919 + element);
    while (count > 1) {
      const int i = order > 1 ? dice.below(count) : order ? count - 1 : 0;
      const float one = terms[i];
      terms[i] = terms[--count];
      const int j = order > 1 ? dice.below(count) : order ? count - 1 : 0;
      terms[j] = coarse(terms[j] + one);
    }
    return terms[0];
  }
  // Relaxed, a number keeps 10 bits of fraction: what it may lose is open.
  MSIM_NOSAN static float coarse(float value) {
    return D.relaxed_precision ? as_type<float>(as_type<uint>(value) & ~0x1fffu) : value;
  }
  template <class G, class L, class R, class T>
  MSIM_NOSAN static void multiply(const metal::msim_x& x, const char* file, unsigned site) {
    constexpr bool MORE = D.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
    float left[D.m * D.k], right[D.k * D.n], sums[D.m * D.n], terms[D.k + 1];
    gather<L, G>(x, &G::left, left, file, site);
    gather<R, G>(x, &G::right, right, file, site);
    if (MORE) gather<T, G>(x, &G::sums, sums, file, site);
    const auto* lies = T::layout::get();
    for (uint i = 0; i < 32 * lies->capacity; i++) {
      const int at = lies->element[i];
      if (at >= T::msim_elements) continue;
      const int m = at / D.n, n = at % D.n;
      for (int k = 0; k < D.k; k++) terms[k] = coarse(left[m * D.k + k] * right[k * D.n + n]);
      if (MORE) terms[D.k] = sums[at];
      const float sum = add(terms, D.k + MORE, at);
      (x.get<G>(i % 32).sums)->e[i / 32] = sum;
    }
  }
};

}  // namespace tensor_ops
}  // namespace mpp
