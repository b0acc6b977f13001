// Metal, through mx.fast.metal_kernel. (ASCII only, in all of these files.)
#define SM_FN inline
#define SM_DEVICE device
#ifndef SM_SHARED
#define SM_SHARED(type, name, count) threadgroup type name[count]
#endif
#ifndef SM_FLOAT4
#define SM_FLOAT4(a, b, c, d) float4(a, b, c, d)
#endif
#define SM_BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SM_SHUFFLE_DOWN(v, d) simd_shuffle_down(v, ushort(d))
#define SM_EXP(v) metal::exp(v)
#define SM_TANH(v) metal::tanh(v)
#define SM_LOAD16(p, i) (p)[i]
#define SM_UNROLL _Pragma("clang loop unroll(full)")
