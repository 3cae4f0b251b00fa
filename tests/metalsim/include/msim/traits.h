// Type traits: what <metal_type_traits> has.
#pragma once
#include "msim/base.h"

namespace metal {

// ------------------------------------------------------------------ type traits
typedef ::size_t size_t;
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool b>
using bool_constant = integral_constant<bool, b>;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class A, class B>
struct conditional {
  typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool b, class A, class B>
using conditional_t = typename conditional<b, A, B>::type;
template <class T>
struct remove_const {
  typedef T type;
};
template <class T>
struct remove_const<const T> {
  typedef T type;
};
template <class T>
struct remove_volatile {
  typedef T type;
};
template <class T>
struct remove_volatile<volatile T> {
  typedef T type;
};
template <class T>
struct remove_as {
  typedef T type;
};
#if MSIM_AS
template <class T>
struct remove_as<device T> {
  typedef T type;
};
template <class T>
struct remove_as<threadgroup T> {
  typedef T type;
};
template <class T>
struct remove_as<MSIM_CONSTANT_AS T> {
  typedef T type;
};
template <class T>
struct remove_as<const device T> {
  typedef const T type;
};
template <class T>
struct remove_as<const threadgroup T> {
  typedef const T type;
};
template <class T>
struct remove_as<const MSIM_CONSTANT_AS T> {
  typedef const T type;
};
#endif
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
using remove_cv_t = typename remove_const<typename remove_volatile<typename remove_as<T>::type>::type>::type;
template <class T>
struct remove_cv {
  typedef remove_cv_t<T> type;
};
template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
struct remove_reference<T&&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
struct remove_pointer {
  typedef T type;
};
template <class T>
struct remove_pointer<T*> {
  typedef T type;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <class T>
using decay_t = remove_cv_t<remove_reference_t<T>>;
template <class T>
T&& declval();
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
struct is_signed : bool_constant<__is_signed(T)> {};
template <class T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T>
struct is_floating_point
    : bool_constant<is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> ||
                    is_same_v<remove_cv_t<T>, bfloat>> {};
template <class T>
struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <class T>
constexpr bool is_integral_v = is_integral<T>::value;
template <class T>
constexpr bool is_signed_v = is_signed<T>::value;
template <class T>
constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <class T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T>
constexpr bool is_scalar_v = is_arithmetic<T>::value;
template <class T>
struct is_void : bool_constant<is_same_v<T, void>> {};
template <class T>
constexpr bool is_void_v = is_void<T>::value;
template <class T>
struct is_pointer : false_type {};
template <class T>
struct is_pointer<T*> : true_type {};
template <class T>
constexpr bool is_pointer_v = is_pointer<T>::value;
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B>
constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <class B, class D>
constexpr bool is_base_of_v = __is_base_of(B, D);
template <class T>
struct make_unsigned {
  typedef __make_unsigned(T) type;
};
template <class T>
using make_unsigned_t = typename make_unsigned<T>::type;
template <class T>
struct make_signed {
  typedef __make_signed(T) type;
};
template <class T>
using make_signed_t = typename make_signed<T>::type;
template <class T>
using remove_addrspace_t = typename remove_as<T>::type;
template <class T>
struct remove_addrspace {
  typedef remove_addrspace_t<T> type;
};
template <class... Bs>
struct _disjunction : bool_constant<(Bs::value || ...)> {};
template <class... Bs>
struct _conjunction : bool_constant<(Bs::value && ...)> {};
template <class... Bs>
struct disjunction : _disjunction<Bs...> {};
template <class... Bs>
struct conjunction : _conjunction<Bs...> {};
template <class... Bs>
constexpr bool disjunction_v = (Bs::value || ...);
template <class... Bs>
constexpr bool conjunction_v = (Bs::value && ...);

}  // namespace metal
