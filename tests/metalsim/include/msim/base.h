// Address spaces as types, scalar types and constants of the Metal language.
#pragma once

#if MSIM_AS
#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define MSIM_CONSTANT_AS __attribute__((opencl_constant))
#else
#define device
#define threadgroup
#define MSIM_CONSTANT_AS
#endif
#define constant const MSIM_CONSTANT_AS
#define thread
#define kernel
#define MSIM_CAT2(a, b) a##b
#define MSIM_CAT(a, b) MSIM_CAT2(a, b)
// inserted before a threadgroup *variable* by the (one) source rewrite; used: or what nobody writes is optimised away
#define MSIM_TG_STATIC                                                                                 \
  static __attribute__((section("msim_tg"), used)) unsigned char MSIM_CAT(msim_pad_, __COUNTER__)[64]; \
  static __attribute__((used, section("msim_tg"), aligned(16)))

#define __METAL__ 1
#ifndef __METAL_VERSION__
#define __METAL_VERSION__ 320
#endif
#define __METAL_MACOS__ 1
#define METAL_FUNC inline __attribute__((__always_inline__))
// nodebug: what is inlined from here bears the line of its caller, which is what a finding must name
#define MSIM_I inline __attribute__((always_inline, nodebug))
#define MSIM_NOSAN __attribute__((noinline, no_sanitize("kernel-address", "address", "thread", "undefined")))

// ------------------------------------------------------------------ scalar types
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;
static_assert(sizeof(long) == 8, "LP64 only");

constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator"" H(long double x) { return (half)x; }
constexpr bfloat operator"" bf(long double x) { return (bfloat)(float)x; }
constexpr bfloat operator"" BF(long double x) { return (bfloat)(float)x; }

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_inff())
#define HUGE_VALH ((half)__builtin_inff())
#define MAXFLOAT 3.40282346638528859811704183484516925e+38f
#define FLT_MAX 3.40282346638528859811704183484516925e+38f
#define FLT_MIN 1.17549435082228750796873653722224568e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define HALF_MAX ((half)65504.0f)
#define MAXHALF ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define HALF_EPSILON ((half)0.0009765625f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define LONG_MAX 9223372036854775807L
#define LONG_MIN (-9223372036854775807L - 1)
#define ULONG_MAX 18446744073709551615UL
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_PI_H ((half)3.14159265358979323846f)
