// What the bitcode in MLX's Metal library leaves to the GPU (Apple calls it AIR), by its names there.
#pragma once
#include "msl_shim.h"
#define SM_STRING(x) #x
#define SM_PREFIX(x) SM_STRING(x)
#define SM_AIR(name) __asm__(SM_PREFIX(__USER_LABEL_PREFIX__) "air." name)

typedef uint32_t air_uint3 __attribute__((vector_size(16)));

extern "C" {
float air_simd_sum(float) SM_AIR("simd_sum.f32");
float air_simd_sum(float v) { return simd_sum(v); }
float air_convert(int) SM_AIR("convert.f.f32.s.i32");
float air_convert(int v) { return float(v); }
int air_min(int, int) SM_AIR("min.s.i32");
int air_min(int a, int b) { return a < b ? a : b; }
int air_clamp(int, int, int) SM_AIR("clamp.s.i32");
int air_clamp(int v, int a, int b) { return metal::clamp(v, a, b); }
int air_sum(int) SM_AIR("simd_sum.s.i32");
int air_sum(int v) { return simd_sum(v); }
int air_shuffle(int, ushort) SM_AIR("simd_shuffle.s.i32");
int air_shuffle(int v, ushort lane) { return simd_shuffle(v, lane); }
int air_prefix_sum(int) SM_AIR("simd_prefix_inclusive_sum.s.i32");
int air_prefix_sum(int v) {
  const auto* put = smemu::simd_put(&v, sizeof v, __LINE__);
  int sum = 0, other;
  for (int i = 0; i <= sm_mylane(); i++) std::memcpy(&other, put->v[i], sizeof other), sum += other;
  return sum;
}
void air_barrier(int, int) SM_AIR("wg.barrier");
void air_barrier(int, int) { smemu::tg_barrier(__LINE__, true); }
void air_simd_barrier(int, int) SM_AIR("simdgroup.barrier");
void air_simd_barrier(int, int) { smemu::simd_sync(__LINE__); }
// Two numbers of a, of b and of c each; the first two become those of a b + c.
void air_multiply(float* v) {
  simdgroup_matrix<float, 8, 8> a{{v[0], v[1]}}, b{{v[2], v[3]}}, c{{v[4], v[5]}};
  simdgroup_multiply_accumulate(c, a, b, c);
  v[0] = c.e[0], v[1] = c.e[1];
}
// LLVM's own, where the machine has no bfloat: not in all compilers' libraries. Its result is where
// any number of 16 bits is.
_Float16 __truncsfbf2(float v) { return as_type<_Float16>(bfloat(v)); }
}
