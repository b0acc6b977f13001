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
// LLVM's own, where the machine has no bfloat: not in all compilers' libraries. Its result is where
// any number of 16 bits is.
_Float16 __truncsfbf2(float v) { return as_type<_Float16>(bfloat(v)); }
}
