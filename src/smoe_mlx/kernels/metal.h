// Metal, through mx.fast.metal_kernel. (ASCII only, in all of these files.)
#define SM_FN inline
#define SM_DEVICE device
#define SM_THREAD thread
#ifndef SM_SHARED
#define SM_SHARED(type, name, count) threadgroup type name[count]
#endif
#ifndef SM_FLOAT4
#define SM_FLOAT4(a, b, c, d) float4(a, b, c, d)
#endif
#define SM_AS_FLOAT(u) as_type<float>(u)
#define SM_HALF_AS_FLOAT(u) float(as_type<half>(ushort(u)))
#define SM_BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SM_SHUFFLE(v, lane) simd_shuffle(v, ushort(lane))
#define SM_SHUFFLE_DOWN(v, d) simd_shuffle_down(v, ushort(d))
#define SM_SHUFFLE_XOR(v, m) simd_shuffle_xor(v, ushort(m))
#define SM_EXP(v) metal::exp(v)
#define SM_TANH(v) metal::tanh(v)
#define SM_LOG(v) metal::log(v)
#define SM_SQRT(v) metal::sqrt(v)
#define SM_LOADED() simdgroup_barrier(mem_flags::mem_none)
#define SM_UNROLL _Pragma("clang loop unroll(full)")
#define SM_NO_UNROLL _Pragma("clang loop unroll(disable)")
