// C++ meaning of the CUDA names the kernels use, over the same lockstep runtime.
#pragma once
#include <cmath>
#include "runtime.h"
#define SM_SHARED_EMU(type, name, count) auto& name = *(type(*)[count])::smemu::tg_alloc(__COUNTER__, sizeof(type) * (count))
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#include <cstdint>
#include <type_traits>
struct cuvec_u4 { unsigned x, y, z, w; } __attribute__((aligned(16))); typedef cuvec_u4 uint4;
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float a, float b, float c, float d) { return float4{a, b, c, d}; }
struct __half { _Float16 v; __half() = default; explicit __half(float f) : v((_Float16)f) {} operator float() const { return (float)v; } };
struct __nv_bfloat16 { uint16_t b; __nv_bfloat16() = default;
  explicit __nv_bfloat16(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); if ((u & 0x7fffffffu) > 0x7f800000u) { b = 0x7fff; return; } b = uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16); }
  operator float() const { uint32_t u = uint32_t(b) << 16; float f; __builtin_memcpy(&f, &u, 4); return f; } };
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
struct Shape { int32_t v[10]; int operator[](int i) const { return v[i]; } };
struct Strides { int64_t v[10]; int64_t operator[](int i) const { return v[i]; } };
#define threadIdx (::smemu::cur()->pos)
#define blockIdx (::smemu::cur()->g->gpos)
#define blockDim (::smemu::cur()->g->gdim)
#define gridDim (::smemu::cur()->g->ngroups)
inline void cu_sync(int site = __builtin_LINE()) { ::smemu::tg_barrier(site, true); }
#define __syncthreads() cu_sync(__LINE__)
inline void __syncwarp(int site = __builtin_LINE()) { ::smemu::simd_sync(site, true); }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T cu_shfl_xor(unsigned mask, T v, int m, int site = __builtin_LINE()) {
  if (mask != 0xffffffffu) ::smemu::fault("partial shuffle mask", site);
  auto* b = ::smemu::simd_put(&v, sizeof v, site); T r; __builtin_memcpy(&r, b->v[::smemu::cur()->lane ^ m], sizeof r); return r;
}
template <class T> inline T cu_shfl_down(unsigned mask, T v, int d, int site = __builtin_LINE()) {
  if (mask != 0xffffffffu) ::smemu::fault("partial shuffle mask", site);
  int l = ::smemu::cur()->lane; auto* b = ::smemu::simd_put(&v, sizeof v, site); T r; __builtin_memcpy(&r, b->v[l + d > 31 ? l : l + d], sizeof r); return r;
}
template <class T> inline T cu_shfl(unsigned mask, T v, int lane, int site = __builtin_LINE()) {
  if (mask != 0xffffffffu) ::smemu::fault("partial shuffle mask", site);
  auto* b = ::smemu::simd_put(&v, sizeof v, site); T r; __builtin_memcpy(&r, b->v[lane & 31], sizeof r); return r;
}
inline float __uint_as_float(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
inline __half __ushort_as_half(unsigned short u) { __half h; __builtin_memcpy(&h, &u, 2); return h; }
inline float __half2float(__half h) { return float(h); }
#define __shfl_sync cu_shfl
#define __shfl_xor_sync cu_shfl_xor
#define __shfl_down_sync cu_shfl_down
// mma.sync.aligned.m16n8k16.row.col: c += a b. Lane 4 g + t has of a the rows g and g + 8, columns
// 2 t, 2 t + 1 and 8 more; of b the same rows of column g; of c columns 2 t, 2 t + 1 of a's rows.
template <class T> inline void cu_mma(float* c, const uint32_t* a, const uint32_t* b, int site) {
  T left[32][4][2], right[32][2][2];
  __builtin_memcpy(left, ::smemu::simd_put(a, 16, site)->v, sizeof left);
  auto* put = ::smemu::simd_put(b, 8, site);
  for (int l = 0; l < 32; l++) __builtin_memcpy(right[l], put->v[l], 8);
  const int g = ::smemu::cur()->lane / 4, t = ::smemu::cur()->lane % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++)
      c[i] += float(left[4 * g + k % 8 / 2][i / 2 + k / 8 * 2][k % 2]) * float(right[4 * (2 * t + i % 2) + k % 8 / 2][k / 8][k % 2]);
}
#define SM_MMA(kind, c, a, b) (kind[0] == 'f' ? cu_mma<__half>(c, a, b, __LINE__) : cu_mma<__nv_bfloat16>(c, a, b, __LINE__))
