// C++ meaning of the MSL names the kernels use, for g++/clang++ on a CPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstddef>
#include <limits>
#include <type_traits>
#include "runtime.h"

// address spaces are one flat memory here (check_types.py tests them with clang)
#define device
#define constant
#define thread
#define threadgroup
#define kernel
#define METAL_FUNC inline
#define SM_SHARED(type, name, count) \
  auto& name = *(type(*)[count])::smemu::tg_alloc(__COUNTER__, sizeof(type) * (count))
#define SM_FLOAT4(a, b, c, d) float4{a, b, c, d}

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;

// 16-bit floats: implicit to float, explicit from float (MSL's bfloat rule, kept
// for half too: stricter than MSL, and what CUDA's __half wants)
struct half {
  _Float16 v;
  half() = default;
  template <class A, class = std::enable_if_t<std::is_arithmetic<A>::value>>
  explicit half(A a) : v((_Float16)(float)a) {}
  operator float() const { return (float)v; }
};
struct bfloat {
  uint16_t b;
  bfloat() = default;
  template <class A, class = std::enable_if_t<std::is_arithmetic<A>::value>>
  explicit bfloat(A a) {
    float f = (float)a;
    uint32_t u;
    std::memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) { b = uint16_t((u >> 16) | 0x40); return; }
    b = uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  operator float() const {
    uint32_t u = uint32_t(b) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};
#define SM_BIN16(op)                                                     \
  inline half operator op(half a, half b) { return half(float(a) op float(b)); } \
  inline bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }
SM_BIN16(+) SM_BIN16(-) SM_BIN16(*) SM_BIN16(/)
#define SM_CMP16(T) template <class A> inline T& operator+=(T& a, A b) { return a = T(float(a) + float(b)); } template <class A> inline T& operator-=(T& a, A b) { return a = T(float(a) - float(b)); } template <class A> inline T& operator*=(T& a, A b) { return a = T(float(a) * float(b)); }
SM_CMP16(half) SM_CMP16(bfloat)
typedef half float16_t;
typedef bfloat bfloat16_t;
static_assert(sizeof(half) == 2 && sizeof(bfloat) == 2, "");

template <class T, int N> struct smvec;
template <class T> struct alignas(2 * sizeof(T)) smvec<T, 2> { T x, y; };
template <class T> struct alignas(4 * sizeof(T)) smvec<T, 3> { T x, y, z; };   // MSL: 3-vectors take 4
template <class T> struct alignas(4 * sizeof(T)) smvec<T, 4> { T x, y, z, w; };
typedef smvec<uint, 2> uint2; struct ulong2 { ulong x, y; ulong2(ulong a, ulong b) : x(a), y(b) {} }; typedef smvec<uint, 3> uint3; typedef smvec<uint, 4> uint4;
typedef smvec<float, 2> float2; typedef smvec<float, 4> float4;
typedef smvec<half, 4> half4; typedef smvec<ushort, 4> ushort4;

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

namespace metal {
#define SM_M1(n) inline float n(float v) { return ::n##f(v); }
SM_M1(log) SM_M1(sqrt) SM_M1(tanh) SM_M1(sin) SM_M1(cos) SM_M1(exp2) SM_M1(log2) SM_M1(floor) SM_M1(ceil) SM_M1(rint) SM_M1(round) SM_M1(expm1) SM_M1(log1p)
inline float rsqrt(float v) { return 1.0f / ::sqrtf(v); }
inline float pow(float a, float b) { return ::powf(a, b); }
inline float abs(float v) { return ::fabsf(v); }
inline int abs(int v) { return v < 0 ? -v : v; }
inline float clamp(float v, float a, float b) { return v < a ? a : v > b ? b : v; }
inline int clamp(int v, int a, int b) { return v < a ? a : v > b ? b : v; }
inline float select(float a, float b, bool c) { return c ? b : a; }
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
inline bool isnan(float v) { return v != v; }
inline bool isinf(float v) { return ::fabsf(v) == __builtin_inff(); }
inline uint popcount(uint v) { return __builtin_popcount(v); }
inline float exp(float v) { return ::expf(v); }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class D, class S> inline D as_type(S s) { static_assert(sizeof(D) == sizeof(S), ""); D d; std::memcpy(&d, &s, sizeof d); return d; }
namespace precise { using metal::exp; using metal::log; using metal::rsqrt; using metal::sqrt; using metal::tanh; using metal::pow; using metal::sin; using metal::cos; using metal::exp2; }
namespace fast { using metal::exp; using metal::log; using metal::rsqrt; using metal::sqrt; using metal::tanh; using metal::pow; using metal::sin; using metal::cos; using metal::exp2; using metal::max; using metal::min; }
}  // namespace metal
using metal::as_type;
namespace precise = metal::precise; namespace fast = metal::fast;

// ---- collectives: site = source line, so that divergence is seen
inline void threadgroup_barrier(mem_flags f, int site = __builtin_LINE()) {
  smemu::tg_barrier(site, (int(f) & 2) != 0);
}
inline void simdgroup_barrier(mem_flags f, int site = __builtin_LINE()) { smemu::simd_sync(site, int(f) != 0); }

template <class T> inline T sm_xchg(T v, int src, int site) {
  auto* b = smemu::simd_put(&v, sizeof v, site);
  if (src < 0 || src > 31 || !b->present[src]) smemu::fault("simd shuffle reads an absent lane", site);
  T r; std::memcpy(&r, b->v[src], sizeof r);
  return r;
}
inline int sm_mylane() { return int(smemu::cur()->lane); }
template <class T> inline T simd_shuffle(T v, ushort l, int site = __builtin_LINE()) { return sm_xchg(v, l, site); }
template <class T> inline T simd_broadcast(T v, ushort l, int site = __builtin_LINE()) { return sm_xchg(v, l, site); }
template <class T> inline T simd_shuffle_xor(T v, ushort m, int site = __builtin_LINE()) { return sm_xchg(v, sm_mylane() ^ m, site); }
template <class T> inline T simd_shuffle_down(T v, ushort d, int site = __builtin_LINE()) {
  int s = sm_mylane() + d; return sm_xchg(v, s > 31 ? sm_mylane() : s, site);   // MSL: out of range lanes keep theirs
}
template <class T> inline T simd_shuffle_up(T v, ushort d, int site = __builtin_LINE()) {
  int s = sm_mylane() - d; return sm_xchg(v, s < 0 ? sm_mylane() : s, site);
}
// reductions: butterfly order, over the lanes present
template <class T, class F> inline T sm_reduce(T v, F f, int site) {
  auto* b = smemu::simd_put(&v, sizeof v, site);
  T t[32]; bool on[32];
  for (int i = 0; i < 32; i++) { on[i] = b->present[i]; if (on[i]) std::memcpy(&t[i], b->v[i], sizeof v); }
  for (int s = 16; s; s /= 2)
    for (int i = 0; i < s; i++) {
      if (on[i] && on[i + s]) t[i] = f(t[i], t[i + s]);
      else if (on[i + s]) { t[i] = t[i + s]; on[i] = true; }
    }
  return t[0];
}
template <class T> inline T simd_sum(T v, int site = __builtin_LINE()) { return sm_reduce(v, [](T a, T b) { return a + b; }, site); }
template <class T> inline T simd_max(T v, int site = __builtin_LINE()) { return sm_reduce(v, [](T a, T b) { return a < b ? b : a; }, site); }
template <class T> inline T simd_min(T v, int site = __builtin_LINE()) { return sm_reduce(v, [](T a, T b) { return b < a ? b : a; }, site); }
// matrices: a lane has two neighbours of a row
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "");
  T e[2];
  T* thread_elements() { return e; }
};
template <class T, int R, int C> inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) { return {{v, v}}; }
inline int sm_at(int r, int c) { return (r & 4) << 2 | (c & 4) << 1 | (r & 3) << 1 | (c & 2) >> 1; }
inline int sm_row(int l) { return (l >> 2 & 4) | (l >> 1 & 3); }
inline int sm_column(int l) { return (l >> 1 & 4) | (l & 1) << 1; }
template <class T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* from, ulong line, ulong2 = ulong2(0, 0), bool transposed = false, int site = __builtin_LINE()) {
  smemu::simd_sync(site);
  const int r = sm_row(sm_mylane()), c = sm_column(sm_mylane());
  for (int i = 0; i < 2; i++) d.e[i] = from[transposed ? (c + i) * line + r : r * line + c + i];
}
template <class T> inline void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<T, 8, 8>& a, simdgroup_matrix<T, 8, 8>& b, simdgroup_matrix<float, 8, 8>& c, int site = __builtin_LINE()) {
  const float mine[4] = {a.e[0], a.e[1], b.e[0], b.e[1]};
  auto* all = (float(*)[4])smemu::simd_put(mine, sizeof mine, site)->v;
  const int row = sm_row(sm_mylane()), column = sm_column(sm_mylane());
  for (int i = 0; i < 2; i++) {
    float sum = c.e[i];
    for (int k = 0; k < 8; k++) sum += all[sm_at(row, k)][k & 1] * all[sm_at(k, column)][2 + i];
    d.e[i] = sum;
  }
}
namespace metal { using ::simd_sum; using ::simd_max; using ::simd_min; using ::simd_shuffle_xor; }
using namespace metal;
